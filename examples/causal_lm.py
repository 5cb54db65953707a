"""Train a small causal language model from random weights, in a loop of your own with Accelerate. It is the same script
in a run or alone, in one process or in several. The first peer waits for a second one:

python examples/causal_lm.py
p2p-diloco join --initial-peers ADDRESS --sync-every 20 --start-peers 2 -- python examples/causal_lm.py
p2p-diloco join --initial-peers ADDRESS -- torchrun --nproc-per-node 2 examples/causal_lm.py
"""

import pathlib
import random
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from p2p_diloco import Peer
from p2p_diloco.integrations.schedule import follow

STEPS, CONTEXT = 240, 64

text = b"".join(path.read_bytes() for path in sorted(pathlib.Path(random.__file__).parent.glob("[a-f]*.py")))
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(CONTEXT)[:-1]  # bytes of the library's code
held_out, training = torch.stack(windows[::50][:128]), [each for i, each in enumerate(windows) if i % 50]

accelerator = Accelerator(cpu=not torch.cuda.is_available())
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=STEPS)
model, optimizer = accelerator.prepare(model, optimizer)  # not the scheduler: `follow` moves it

with Peer.from_env(model, optimizer) as peer:  # after `prepare`; does nothing if no run is named
    order = torch.Generator().manual_seed(peer.seed)  # every peer has an order of its own
    own = random.Random(peer.seed).sample(training, 48)  # and data of its own
    batches = iter(())
    while peer.global_step < STEPS and not peer.finished:
        follow(scheduler, peer.global_step)  # a late joiner has the learning rate of the others
        if (batch := next(batches, None)) is None:
            batches = iter(accelerator.prepare(DataLoader(own, batch_size=8, shuffle=True, generator=order)))
            batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        peer.report(loss=loss.item(), samples=len(batch))
        optimizer.step()
        optimizer.zero_grad()

model = accelerator.unwrap_model(model).eval()
model.load_state_dict(peer.global_state_dict())  # the run's result, on every rank
with torch.no_grad():
    loss = model(input_ids=held_out.to(accelerator.device), labels=held_out.to(accelerator.device)).loss
if accelerator.is_main_process:
    model.save_pretrained("causal-lm")
    sys.stderr.write(f"step {peer.global_step}  epoch {peer.epoch}  held-out loss {loss:.4f}\n")
