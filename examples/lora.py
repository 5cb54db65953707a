"""Fine-tune a frozen model with LoRA adapters in Transformers' Trainer. Only the adapters are exchanged. It is the same
script in a run or alone; in a run the first peer waits for a second one:

python examples/lora.py
p2p-diloco join --initial-peers ADDRESS --sync-every 20 --start-peers 2 -- python examples/lora.py
"""

import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from p2p_diloco.integrations.transformers import DilocoCallback

OWN_DATA = torch.Generator()
OWN_DATA.seed()  # every peer draws its own data


def sentences(count: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Sentences of 16 words out of 64; the label says whether words below 32 are in the majority of the first half."""
    words = torch.randint(64, (count, 16), generator=generator)
    labels = ((words[:, :8] < 32).sum(1) >= 4).long()
    return [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]


torch.manual_seed(0)  # the same frozen weights on every peer: yours come from `from_pretrained`
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
base = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **shape))
model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, target_modules="all-linear"))

callback = DilocoCallback()  # takes its settings from `p2p-diloco join`; without it, does nothing
trainer = Trainer(
    model,
    TrainingArguments(
        "lora-checkpoints",
        max_steps=240,  # of the run: a late joiner makes only those that are left
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=80,  # of the run, too: all peers evaluate at the same steps
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=sentences(512, OWN_DATA),
    eval_dataset=sentences(1024, torch.Generator().manual_seed(1)),
    callbacks=[callback],
)
trainer.train()  # evaluates the global parameters; when it returns, the model holds the run's result
trainer.save_model("lora-adapter")
loss = trainer.evaluate()["eval_loss"]
sys.stderr.write(f"step {callback.peer.global_step}  epoch {callback.peer.epoch}  held-out loss {loss:.4f}\n")
