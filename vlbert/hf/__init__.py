"""VL-BERT, Unicoder-VL and ViLBERT as models of Hugging Face transformers (docs/library.md).

    from transformers import AutoModelForPreTraining, AutoProcessor

    import vlbert.hf  # registers the classes below with transformers' Auto classes

    processor = AutoProcessor.from_pretrained("ROOT/runs/pretrain")
    model = AutoModelForPreTraining.from_pretrained("ROOT/runs/pretrain")
    outputs = model(**processor(images=image, text="a red [MASK]", boxes=boxes))

The models wrap the classes of vlbert/model and vlbert/tasks, and return bit-identical outputs.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForVisualQuestionAnswering,
    AutoProcessor,
    AutoTokenizer,
)

from vlbert.hf.config import VLBertConfig
from vlbert.hf.models import (
    VLBertForImageTextRetrieval,
    VLBertForPreTraining,
    VLBertForQuestionAnswering,
    VLBertForReferringExpression,
    VLBertForVisualCommonsenseReasoning,
    VLBertModel,
)
from vlbert.hf.processor import VLBertProcessor, VLBertTokenizer

__all__ = [
    "VLBertConfig",
    "VLBertForImageTextRetrieval",
    "VLBertForPreTraining",
    "VLBertForQuestionAnswering",
    "VLBertForReferringExpression",
    "VLBertForVisualCommonsenseReasoning",
    "VLBertModel",
    "VLBertProcessor",
]

AutoConfig.register(VLBertConfig.model_type, VLBertConfig, exist_ok=True)
AutoModel.register(VLBertConfig, VLBertModel, exist_ok=True)
AutoModelForPreTraining.register(VLBertConfig, VLBertForPreTraining, exist_ok=True)
AutoModelForVisualQuestionAnswering.register(VLBertConfig, VLBertForQuestionAnswering, exist_ok=True)
AutoModelForMultipleChoice.register(VLBertConfig, VLBertForVisualCommonsenseReasoning, exist_ok=True)
AutoTokenizer.register(VLBertConfig, fast_tokenizer_class=VLBertTokenizer, exist_ok=True)
AutoProcessor.register(VLBertConfig, VLBertProcessor, exist_ok=True)
