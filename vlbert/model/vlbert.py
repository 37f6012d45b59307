"""VLBert: a batch of captions and images in, contextual vectors of words and regions out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from vlbert.checkpoint import CONFIG, MODEL, VOCABULARY, load_model, model_files, read_model
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.embedding import VisualLinguisticEmbedding
from vlbert.model.fast_rcnn import FastRCNN
from vlbert.model.heads import initialise
from vlbert.model.layers import Encoder


@dataclass(frozen=True, eq=False)
class Encoded:
    """The contextual vectors of a batch. Those of padding mean nothing; the masks are the batch's.

    text        float [N, T, C]
    regions     float [N, R, C]
    appearance  float [K, D]         the appearance feature of the real regions of all images, in image order
    attentions  a float [N, heads, T + R + 1, T + R + 1] a layer, where wanted: the attention weights of each word,
                region and [END], in this order; a row sums to 1, and padding receives 0
    """

    text: Tensor
    regions: Tensor
    appearance: Tensor
    attentions: tuple[Tensor, ...] | None = None


class VLBert(nn.Module, ModelHubMixin, library_name="vlbert"):
    """Fast R-CNN features, the visual-linguistic embedding and the encoder (paper, figure 1).

    `VLBert.from_pretrained(folder or hub name)` reads what `save_pretrained(folder)`, a training run (into its step-*
    folders) or `python -m vlbert.convert` wrote: config.json, model.safetensors and vocab.txt. `vocabulary` is that
    of the weights, where they came with one.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, vocabulary: Vocabulary | None = None):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.vocabulary = vocabulary
        self.fast_rcnn = FastRCNN(config.regions) if config.regions.features == "end_to_end" else None
        self.embedding = VisualLinguisticEmbedding(config, vocab_size)
        self.encoder = Encoder(config)
        initialise(self.embedding, config.initializer_range)
        initialise(self.encoder, config.initializer_range)
        self.embedding.initialise()

    def forward(self, batch: Batch, attentions: bool = False) -> Encoded:
        """Batch (see vlbert/data/batch.py) -> Encoded, with attention maps if `attentions`.

        ValueError where a row is longer than the position table, or the batch brings no features and the model takes
        precomputed ones.
        """
        if batch.tokens.shape[1] + 2 > self.config.max_positions:
            row = int(batch.text_mask.sum(dim=1).argmax())
            raise ValueError(
                f"row {row} of the batch with sample {batch.keys[0]}: {batch.tokens.shape[1]} tokens, regions and "
                f"[END] need {batch.tokens.shape[1] + 2} positions, the model has max_positions = "
                f"{self.config.max_positions}"
            )
        appearance = self.appearance(batch)
        maps: list[Tensor] | None = [] if attentions else None
        encoded = self.encoder(self.embedding(batch, appearance), maps)
        regions = encoded.regions[:, : batch.region_mask.shape[1]]  # without [END]
        return Encoded(encoded.text, regions, appearance, tuple(maps) if attentions else None)

    def appearance(self, batch: Batch) -> Tensor:
        """The appearance features of the K real regions of the batch's images, in image order: [K, D]."""
        if not len(batch.image_rows):
            return self.embedding.words.weight.new_zeros(0, self.config.regions.channels)
        if self.fast_rcnn is not None:
            return self.fast_rcnn(batch)
        wanted = (int(batch.region_mask[batch.image_rows].sum()), self.config.regions.channels)
        if tuple(batch.features.shape) != wanted:
            raise ValueError(
                f"the batch with sample {batch.keys[0]} has features {tuple(batch.features.shape)}, the model takes "
                f"{wanted} precomputed ones; detect with keep_features=true, or set model.regions.features=end_to_end"
            )
        return batch.features.to(self.embedding.visual.weight.dtype)

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {f"vlbert.{name}": tensor for name, tensor in self.state_dict().items()}
        (save_directory / VOCABULARY).unlink(missing_ok=True)  # that of a model which this one replaces
        for name, data in model_files(tensors, self.config, self.vocab_size, self.vocabulary).items():
            (save_directory / name).write_bytes(data)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> "VLBert":
        """The model of a local folder or, by name, of the Hugging Face hub; in eval mode, on the CPU, float32.

        revision, cache_dir, force_download, local_files_only and token are those of `hf_hub_download`. ValueError where
        there is no model, or one of another version of this code.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = download_model(
                str(pretrained_model_name_or_path),
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        saved = read_model(folder)
        model = cls(saved.model_config, saved.vocab_size, saved.vocabulary)
        load_model(model, saved.part("vlbert."), saved.where)
        return model.eval()


def download_model(name: str, **options: Any) -> Path:
    """The folder with the files of a model of the hub; ValueError where there is none of that name."""
    try:
        folder = Path(hf_hub_download(name, CONFIG, **options)).parent
        options["revision"] = folder.name  # the same commit for all files, whatever is pushed meanwhile
        try:
            hf_hub_download(name, VOCABULARY, **options)
        except EntryNotFoundError as error:  # a model may come without its vocabulary
            if isinstance(error, LocalEntryNotFoundError) and not options["local_files_only"]:
                raise  # the hub was out of reach
        hf_hub_download(name, MODEL, **options)
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} is neither a folder nor a model on the hub ({reason})") from error
    return folder
