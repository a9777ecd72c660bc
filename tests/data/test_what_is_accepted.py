"""What a dataset or a checkpoint may say, and what becomes of it: a table of what is taken, noted and refused.

Every row is run: a good folder is changed in one way, and goes through the doors of a run of imitation (`--dry-run` has
the first and the last of them): the dataset is opened, its frames are decoded, and its notes are listed.
"""

import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf_lite.cli import parse_cli
from rlinf_lite.config import load_config
from rlinf_lite.config.plan import observed
from rlinf_lite.data.dataset_notes import dataset_notes
from rlinf_lite.data.demonstrations import Demonstrations, beyond_bounds, decode_frames, open_dataset
from rlinf_lite.data.lerobot.layout import ACTION, PICTURES, STATE, LeRobotError, picture_feature, vector_feature
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish
from rlinf_lite.dimensions import write_names
from rlinf_lite.envs import get_env_spec, make_env
from rlinf_lite.envs.tabletop.card import ACTION_NAMES, OWN_STATE_NAMES
from rlinf_lite.envs.tabletop.simulator import TabletopSimulator
from rlinf_lite.models import build_policy
from rlinf_lite.models.base import PolicyInputs
from rlinf_lite.workers.collecting import Collector
from tests.data.lerobot_folders import edit_column, edit_info, put_in_order

TOP = PICTURES + "top"
BLIND = PolicyInputs({"top": (64, 64)}, 0, has_instruction=True)
READER = PolicyInputs({"top": (64, 64)}, 4, has_instruction=True)
CONFIG = "tabletop_sft_vla"


def written(directory, facts=lambda number: {"success": True}):
    features = {
        STATE: vector_feature("state", 4, OWN_STATE_NAMES),
        ACTION: vector_feature("action", 3, ACTION_NAMES),
        TOP: picture_feature("image", 64, 64, 10),
    }
    part, rng = PartWriter(begin(directory) / "rank_000", features, 10), np.random.default_rng(0)
    for number, length in enumerate((5, 3)):
        columns = {
            STATE: rng.uniform(0, 1, (length, 4)).astype(np.float32),
            ACTION: rng.uniform(-1, 1, (length, 3)).astype(np.float32),
            TOP: rng.integers(0, 255, (length, 64, 64, 3), dtype=np.uint8),
        }
        part.add(Episode(number, columns, [f"pick block {number}"] * length, facts(number)))
    part.finish()
    publish(directory, 10, "tabletop")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("good") / "set"
    written(directory)
    return directory


@pytest.fixture(scope="module")
def untouched(good):
    frames, notes = door(good)
    assert notes == []
    return frames


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "set")


def door(folder, *overrides, reads=READER):
    """Frames as they would be trained on, and the notes; raises what a run would raise."""
    cfg = load_config(CONFIG, ["data.source=folder", f"data.demos_dir={folder}", *overrides])
    spec = spec_of(cfg)
    dataset = open_dataset(cfg, folder, spec)
    frames = Demonstrations(decode_frames(cfg, dataset, spec), 4, 1).frames
    return frames, [*dataset_notes(cfg, dataset, spec, reads), *beyond_bounds(frames, spec)]


def named(key, names):
    def change(folder):
        edit_info(folder, lambda info: info["features"][key].update(names=names))

    return change


def of_tasks(*sentences):
    def change(folder):
        file = folder / "meta/tasks.parquet"
        table = pq.read_table(file)
        pq.write_table(table.set_column(table.schema.names.index("task"), "task", pa.array(sentences)), file)

    return change


def column(key, change):
    return lambda folder: edit_column(folder, key, change)


def info(change):
    return lambda folder: edit_info(folder, change)


def with_nan(values):
    values = values.copy()
    values[2, 1] = np.nan
    return values


def failed(folder):
    shutil.rmtree(folder)
    written(folder, lambda number: {"success": number == 0})


def with_an_empty_episode(folder):
    file = folder / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    empty = {**table.to_pylist()[-1], "episode_index": 2, "length": 0, "dataset_from_index": 8}
    pq.write_table(pa.Table.from_pylist([*table.to_pylist(), empty], schema=table.schema), file)
    edit_info(folder, lambda info: info.update(total_episodes=3))


def past_the_tasks(folder):
    [file] = (folder / "data").rglob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.names.index("task_index"), "task_index", pa.array([7] * 8)), file)


def feature_info(key, **said):
    return info(lambda content: content["features"][key].update(info=said))


AS_IT_IS, REFUSED, NOTED = "taken as it is", "refused", "noted"
ROWS = {
    # names of dimensions
    "the environment's names": (lambda folder: None, AS_IT_IS, ""),
    "its names by group": (named(STATE, {"motors": [*OWN_STATE_NAMES]}), AS_IT_IS, ""),
    "its names in another order": (lambda x: put_in_order(x, STATE, (2, 0, 3, 1)), NOTED, ": x, y, closed, holding"),
    "its actions in another order": (lambda x: put_in_order(x, ACTION, (1, 2, 0)), NOTED, "order: x, y, close"),
    "no names": (named(STATE, None), AS_IT_IS, ""),
    "too few names": (named(STATE, ["x", "y"]), NOTED, "does not have a name for each of the 4 columns"),
    "names that only count": (named(STATE, {"motors": [f"motor_{i}" for i in range(4)]}), AS_IT_IS, ""),
    "one name for all": (named(STATE, ["state"]), AS_IT_IS, ""),
    "other names": (named(STATE, ["a", "b", "c", "d"]), REFUSED, "are a, b, c, d.*x, y, closed, holding.*match_names"),
    "a name of its own": (named(ACTION, ["x", "y", "wrist"]), REFUSED, "data.keys.action.*x, y, wrist.*x, y, close"),
    "a name twice": (named(STATE, ["x", "y", "closed", "closed"]), REFUSED, "x, y, closed, closed"),
    # sentences
    "one empty task": (of_tasks("pick block 0", " "), NOTED, '1 of 2 tasks of the dataset are ""'),
    "empty tasks": (of_tasks("", " "), NOTED, 'every task of the dataset is "".*learns nothing'),
    "a task that there is none of": (past_the_tasks, REFUSED, "has task 7, and there are 2"),
    # numbers
    "NaN": (column(STATE, with_nan), REFUSED, r"observation.state\[1\] is nan in frame 2 of episode 0"),
    "actions in other units": (column(ACTION, lambda x: x * 57), NOTED, r"action\[0\] is in.*takes \[-1, 1\]"),
    "an episode of no frames": (with_an_empty_episode, AS_IT_IS, ""),
    "another count of episodes": (info(lambda x: x.update(total_episodes=3)), REFUSED, "3 episodes of 8 frames"),
    "another width": (info(lambda x: x["features"][ACTION].update(shape=[4])), REFUSED, "action has 4 numbers"),
    # pictures
    "a depth map in PNG": (feature_info(TOP, is_depth_map=True), REFUSED, "is a depth map in info.json"),
    "the same, as it was written before": (feature_info(TOP, **{"video.is_depth_map": True}), REFUSED, "a depth map"),
    "pictures of channels first": (info(lambda x: x["features"][TOP].update(shape=[3, 64, 64])), AS_IT_IS, ""),
    "pictures of one channel": (info(lambda x: x["features"][TOP].update(shape=[64, 64, 1])), NOTED, "not three col"),
    # episodes and clock
    "episodes that failed": (failed, NOTED, "1 of 2 episodes did not succeed"),
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_what_a_dataset_says_is_taken_noted_or_refused(folder, untouched, what):
    change, due, text = ROWS[what]
    change(folder)
    if due == REFUSED:
        with pytest.raises(LeRobotError, match=f"(?s){text}"):
            door(folder)
        return
    frames, notes = door(folder)
    found = [line for line in notes if re.search(text, line)]
    assert (notes == [], found != []) == ((True, False) if due == AS_IT_IS else (False, True)), notes
    if "order" in what or due == AS_IT_IS:
        assert np.array_equal(frames.state, untouched.state) and np.array_equal(frames.actions, untouched.actions)
        assert frames.statistics == untouched.statistics


KEYS = {
    "the state that the policy reads": ([], READER, ""),
    "a state that it does not read": ([], BLIND, "^the policy reads no state: observation.state of the dataset is"),
    "the same, named in data.keys": (["data.keys.state=robot"], BLIND, "^data.keys.state is robot, and the policy"),
    "no state, where none is read": (["data.keys.state=null"], BLIND, ""),
    "a state that the environment has not": (
        ["data.keys.state=robot", "env.id=tests.data.test_what_is_accepted:make_blind_env"],
        None,
        "^data.keys.state is robot, and the environment shows no state",
    ),
}


@pytest.mark.parametrize("what", KEYS)
def test_what_data_keys_name_and_nobody_reads_is_noted(folder, what):
    overrides, reads, text = KEYS[what]
    if "data.keys.state=robot" in overrides:
        edit_info(folder, lambda x: x["features"].update(robot=x["features"].pop(STATE)))
        [file] = (folder / "data").rglob("*.parquet")
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([name.replace(STATE, "robot") for name in table.column_names]), file)
    _, notes = door(folder, *overrides, reads=reads)
    assert [bool(re.search(text, line)) for line in notes] == [True] * bool(text)


class _Blind(TabletopSimulator):
    """Shows pictures alone, and gives no instruction."""

    state_names = None

    def observe(self, rows):
        return {"images": super().observe(rows)["images"], "instruction": [""] * len(rows)}


def make_blind_env(num_envs, cfg, split):
    own = load_config(CONFIG).env
    return _Blind(num_envs, own, split)


def test_sentences_that_the_policy_will_not_see_are_said_to_be_left_out(folder):
    frames, notes = door(folder, "env.id=tests.data.test_what_is_accepted:make_blind_env", reads=BLIND)
    assert set(frames.tasks) == {""}
    assert "the environment gives no instruction: the dataset's sentences are left out" in notes


def test_a_clock_that_is_not_the_environments_is_noted(tmp_path):
    features = {STATE: vector_feature("state", 3), ACTION: vector_feature("action", 1)}
    for rate in (30, 10):  # Pendulum has 30
        directory = tmp_path / str(rate)
        part = PartWriter(begin(directory) / "rank_000", features, rate)
        part.add(Episode(0, {key: np.zeros((4, x.width), np.float32) for key, x in features.items()}, ["swing"] * 4))
        part.finish()
        publish(directory, rate, None)
    chosen = ["data.source=folder", f"data.demos_dir={directory}", "runner.task_type=sft", "runner.max_steps=1"]
    cfg = load_config("gym_pendulum_ppo_mlp", chosen)
    told = [dataset_notes(cfg, open_dataset(cfg, tmp_path / rate, None), observed(cfg), None) for rate in ("30", "10")]
    assert told == [[], ["a frame is 1/10 s there, and a step of the environment 1/30 s"]]


def test_columns_are_taken_as_they_come_where_their_names_are_not_to_count(folder, untouched):
    put_in_order(folder, STATE, (2, 0, 3, 1))
    frames, notes = door(folder, "data.keys.match_names=false")
    assert notes == [] and np.array_equal(frames.state, untouched.state[:, [2, 0, 3, 1]])


POLICIES = {
    "no names": ({}, ""),
    "the environment's names": ({"state": OWN_STATE_NAMES, "action": ACTION_NAMES}, ""),
    "names that only count": ({"state": ["s_0", "s_1", "s_2", "s_3"]}, ""),
    "its names in another order": (
        {"action": ("y", "x", "close")},
        "load_path: the policy's action is y, x, close, and the environment's x, y, close",
    ),
    "other names": ({"state": ("a", "b", "c", "d")}, "the policy's state is a, b, c, d, and the environment's x"),
}


@pytest.mark.parametrize("what", POLICIES)
@pytest.mark.parametrize("env_id", ["tabletop", "tests.data.test_what_is_accepted:make_other_env"])
def test_a_checkpoints_names_are_the_environments_or_it_is_refused(tmp_path, env_id, what):
    """Before anything starts where the environment has a card; else when its policy is built."""
    names, wrong = POLICIES[what]
    saved(tmp_path, names)
    try:
        cfg = load_config(CONFIG, [f"actor.checkpoint_load_path={tmp_path}", f"env.id={env_id}"])
        assert env_id != "tabletop" or not wrong
        kept = build_policy(cfg, spec_of(cfg)).dimension_names
    except ValueError as error:
        assert wrong and wrong in str(error)
    else:
        assert not wrong and kept == {"state": list(OWN_STATE_NAMES), "action": list(ACTION_NAMES)}


def test_a_teacher_of_other_names_teaches_nothing(tmp_path):
    saved(tmp_path / "teacher", {"action": ("y", "x", "close")})
    cfg = load_config(CONFIG, [f"data.teacher_dir={tmp_path / 'teacher'}"])
    env = make_env(cfg.env, "train", 1)
    with pytest.raises(LeRobotError, match=r"data\.teacher_dir: the policy's action is y, x, close"):
        Collector(cfg, env, env.reset(seeds=[0]), tmp_path / "set", 0, "cpu")


def make_other_env(num_envs, cfg, split):
    return TabletopSimulator(num_envs, load_config(CONFIG).env, split)


def spec_of(cfg):
    env = make_env(cfg.env, "train", 1)
    return get_env_spec(env, env.reset(seeds=[0]))


def saved(directory, names):
    """A policy that reads the state of Tabletop's robot, and says of it these names."""
    cfg = load_config(CONFIG, ["model.options.use_proprio=true"])
    build_policy(cfg, spec_of(cfg)).save_pretrained(directory)
    write_names(directory, names)


def test_a_dataset_is_put_in_the_order_of_the_policy_that_learns_from_it(folder, tmp_path):
    """Where the environment names nothing: names go from the first dataset to the checkpoint, and from there on."""
    unnamed = "env.id=tests.data.test_what_is_accepted:make_unnamed_env"
    untouched, _ = door(folder, unnamed)
    assert untouched.names == {"state": list(OWN_STATE_NAMES), "action": list(ACTION_NAMES)}
    saved(tmp_path / "policy", untouched.names)
    put_in_order(folder, STATE, (2, 0, 3, 1))
    trained = f"actor.checkpoint_load_path={tmp_path / 'policy'}"
    frames, notes = door(folder, unnamed, trained)
    assert np.array_equal(frames.state, untouched.state) and "order" in notes[0]
    named(STATE, ["a", "b", "c", "d"])(folder)
    with pytest.raises(LeRobotError, match=r"are a, b, c, d, and those of the policy in .* x, y, closed, holding"):
        door(folder, unnamed, trained)


def make_unnamed_env(num_envs, cfg, split):
    simulator = TabletopSimulator(num_envs, load_config(CONFIG).env, split)
    simulator.state_names = simulator.action_names = None
    return simulator


def test_a_dry_run_says_what_is_not_read_and_refuses_other_names(folder, capsys):
    """The environment is the user's own, so that only making it shows what it gives."""

    def previewed(*overrides):
        with pytest.raises(SystemExit) as ended:
            parse_cli([*overrides, "--dry-run"], None, task_type=None)
        said = capsys.readouterr()
        return ended.value.code, [line for line in said.out.splitlines() if line.startswith("note: ")], said.err

    imitating = [CONFIG, "data.source=folder", f"data.demos_dir={folder}"]
    unread = "note: the policy reads no state: observation.state of the dataset is not used"
    assert previewed(*imitating) == (0, [unread], "")
    reading = [*imitating, "model.options.use_proprio=true"]
    assert previewed(*reading) == (0, [], "")
    of_tasks("", "")(folder)
    assert previewed(*reading)[1][0].startswith('note: every task of the dataset is "" (2 of 2)')
    blind = "env.id=tests.data.test_what_is_accepted:make_blind_env"
    none_given = 'note: openvla reads an instruction, and pick gives none: it is "" in every row'
    assert previewed("tabletop_ppo_vla", blind) == (0, [none_given], "")
    named(ACTION, ["a", "b", "c"])(folder)
    code, _, wrong = previewed(*reading, "env.id=tests.data.test_what_is_accepted:make_other_env")
    assert code == 1 and "the columns of action are a, b, c, and the environment's x, y, close" in wrong
