"""Runs whose roles release memory between phases: each move is a copy here, as between a GPU and the host."""

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.training import offload
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker
from tests.runners.conftest import read_metrics

pytestmark = pytest.mark.processes

PLACES = {
    "shards": ["cluster.component_placement={actor: 0-1, rollout: 0-1, env: '0'}", "actor.strategy=fsdp"],
    "fused": ["cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "cluster.fuse='actor,rollout'"],
}


def copy_when_moved():
    offload.is_on = lambda tensor, device: False


class CopiedActor(EmbodiedFSDPActor):
    def init(self, layout, spec, total_steps):
        copy_when_moved()
        return super().init(layout, spec, total_steps)


class CopiedRollout(MultiStepRolloutWorker):
    def init(self, layout, spec):
        copy_when_moved()
        super().init(layout, spec)
        acting = self.policy.predict_action_batch

        def acts(obs, mode):
            kept = not self.cfg.rollout.offload or self.weights._host
            assert kept, "parameters are in host memory"
            return acting(obs, mode)

        self.policy.predict_action_batch = acts


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_same_numbers(start, tmp_path, place):
    """Also with evaluations, checkpoints, and a resumed run."""
    ours = [*PLACES[place], "runner.val_check_interval=2", "runner.save_interval=2", "actor.num_threads=1"]
    offloads = ["actor.offload=true", *["rollout.offload=true"] * (place != "fused")]
    workers = {"actor": CopiedActor, "rollout": CopiedRollout, "env": EnvWorker}
    expected = start(*ours, root=tmp_path / "without").run()
    start.stop()
    found = start(*ours, *offloads, root=tmp_path / "with", workers=workers).run(until=2)
    start.stop()
    assert found.checkpoint is not None
    again = [*ours, *offloads, f"runner.resume={found.checkpoint}"]
    found = start(*again, root=tmp_path / "with", workers=workers).run()
    assert [e.total for e in found.evals] == [e.total for e in expected.evals][-len(found.evals) :]
    one, other = (load_file(result.checkpoint / "policy" / "model.safetensors") for result in (expected, found))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    names = ("rollout/returns_mean", "train/actor/policy_loss", "eval/return", "train/actor/ratio_max")
    lines, others = ({line["step"]: line for line in read_metrics(x.run_dir)} for x in (expected, found))
    assert [lines[3].get(name) for name in names] == [others[3].get(name) for name in names]
