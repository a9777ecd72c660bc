"""A sharded language model scores and learns as a whole one: FSDP2 on two gloo ranks."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlinf_lite.models.text import causal_lm
from rlinf_lite.models.text.causal_lm import CausalLM, CausalValueModel
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.training_options import TrainingOptions
from rlinf_lite.training.sharding import full_policy_state, load_policy_state
from rlinf_lite.training.strategies import init_process_group
from tests.ranks import spawn

CONFIG = preset("tiny") | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make(cls, checkpointing=True):
    torch.manual_seed(0)
    model = cls.from_config(CONFIG).train()
    if checkpointing:
        model.prepare(TrainingOptions(gradient_checkpointing="full"))
    return model


def use(policy, critic):
    """Every entry point, and the gradients. All ranks see the same batch, so means over ranks are those of one."""
    ids = torch.arange(4, 40).view(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    output, values = policy(ids, mask, 5, 0.8), critic(ids, mask, 5)
    (output.logprobs.mean() + output.entropy.mean() + values.square().mean()).backward()
    found = {"logprobs": output.logprobs, "values": values}
    return found | {f"1 {name}": whole(p.grad) for m in (policy, critic) for name, p in m.named_parameters()}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def rank_main(rank, port, expected, directory):
    causal_lm.LOGITS_PER_CHUNK = 400  # several chunks, recomputed while weights are gathered
    init_process_group(rank, 2, "127.0.0.1", port, "cpu", 60)
    models = [make(cls) for cls in (CausalLM, CausalValueModel)]
    for model in models:
        for unit in model.fsdp_units():
            fully_shard(unit)
        fully_shard(model)
    torch.testing.assert_close(use(*models), expected, atol=1e-5, rtol=1e-4)
    state = full_policy_state(models[0])
    if rank == 0:
        models[0].save_pretrained(directory, state)
    dist.barrier()
    load_policy_state(models[0], models[0].read_state(directory))
    for model in models:
        model.zero_grad()
    torch.testing.assert_close(use(*models), expected, atol=1e-5, rtol=1e-4)
    dist.destroy_process_group()


def test_sharded_models_equal_whole_ones(tmp_path):
    expected = {k: v.detach() for k, v in use(make(CausalLM, False), make(CausalValueModel, False)).items()}
    spawn(rank_main, 2, expected, tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    ids = torch.arange(4, 40).view(3, 12)
    want = make(CausalLM, False)(ids, torch.ones_like(ids), 5).logprobs
    torch.testing.assert_close(again(ids, torch.ones_like(ids), 5).logprobs, want)
