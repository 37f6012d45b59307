"""One function a run; each returns the whole configuration. A name tells task, model, size and variant:
finetune_vqa_base is VL-BERT's, finetune_vqa_vilbert_base ViLBERT's.

Steps are epochs of the data set over the batch: 3.3 M captions, 213 k questions of VCR, 444 k of VQA's train2014, 120 k
expressions of RefCOCO+. `data.batch` is global: whatever the number of GPUs, batch = GPUs x gradient_accumulation x
what one GPU computes at a time, and the learning rate is the one that stands here.
"""

from vlbert.recipes import demo, unicoder_vl, vilbert, vlbert

RECIPES = {
    name: made
    for module in (vlbert, unicoder_vl, vilbert, demo)
    for name, made in vars(module).items()
    if name.startswith(("pretrain_", "finetune_")) and made.__module__ == module.__name__
}
