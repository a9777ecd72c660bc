"""LIBERO's five suites with 130 tasks, LIBERO-PRO's variants of them, and the published lengths of their episodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlinf_lite.config.rules.cards import named_tasks
from rlinf_lite.envs.libero.pro import new_sentence

NUM_INITIAL_STATES = 50
"""Number of initial states that are published for each task, in the library's wheel."""

_SPATIAL = """
pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate
pick_up_the_black_bowl_next_to_the_ramekin_and_place_it_on_the_plate
pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate
pick_up_the_black_bowl_on_the_cookie_box_and_place_it_on_the_plate
pick_up_the_black_bowl_in_the_top_drawer_of_the_wooden_cabinet_and_place_it_on_the_plate
pick_up_the_black_bowl_on_the_ramekin_and_place_it_on_the_plate
pick_up_the_black_bowl_next_to_the_cookie_box_and_place_it_on_the_plate
pick_up_the_black_bowl_on_the_stove_and_place_it_on_the_plate
pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate
pick_up_the_black_bowl_on_the_wooden_cabinet_and_place_it_on_the_plate
"""
_OBJECT = """
pick_up_the_alphabet_soup_and_place_it_in_the_basket
pick_up_the_cream_cheese_and_place_it_in_the_basket
pick_up_the_salad_dressing_and_place_it_in_the_basket
pick_up_the_bbq_sauce_and_place_it_in_the_basket
pick_up_the_ketchup_and_place_it_in_the_basket
pick_up_the_tomato_sauce_and_place_it_in_the_basket
pick_up_the_butter_and_place_it_in_the_basket
pick_up_the_milk_and_place_it_in_the_basket
pick_up_the_chocolate_pudding_and_place_it_in_the_basket
pick_up_the_orange_juice_and_place_it_in_the_basket
"""
_GOAL = """
open_the_middle_drawer_of_the_cabinet
put_the_bowl_on_the_stove
put_the_wine_bottle_on_top_of_the_cabinet
open_the_top_drawer_and_put_the_bowl_inside
put_the_bowl_on_top_of_the_cabinet
push_the_plate_to_the_front_of_the_stove
put_the_cream_cheese_in_the_bowl
turn_on_the_stove
put_the_bowl_on_the_plate
put_the_wine_bottle_on_the_rack
"""
_10 = """
LIVING_ROOM_SCENE2_put_both_the_alphabet_soup_and_the_tomato_sauce_in_the_basket
LIVING_ROOM_SCENE2_put_both_the_cream_cheese_box_and_the_butter_in_the_basket
KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it
KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet_and_close_it
LIVING_ROOM_SCENE5_put_the_white_mug_on_the_left_plate_and_put_the_yellow_and_white_mug_on_the_right_plate
STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_back_compartment_of_the_caddy
LIVING_ROOM_SCENE6_put_the_white_mug_on_the_plate_and_put_the_chocolate_pudding_to_the_right_of_the_plate
LIVING_ROOM_SCENE1_put_both_the_alphabet_soup_and_the_cream_cheese_box_in_the_basket
KITCHEN_SCENE8_put_both_moka_pots_on_the_stove
KITCHEN_SCENE6_put_the_yellow_and_white_mug_in_the_microwave_and_close_it
"""
_90 = """
KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet
KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet_and_put_the_black_bowl_on_top_of_it
KITCHEN_SCENE10_put_the_black_bowl_in_the_top_drawer_of_the_cabinet
KITCHEN_SCENE10_put_the_butter_at_the_back_in_the_top_drawer_of_the_cabinet_and_close_it
KITCHEN_SCENE10_put_the_butter_at_the_front_in_the_top_drawer_of_the_cabinet_and_close_it
KITCHEN_SCENE10_put_the_chocolate_pudding_in_the_top_drawer_of_the_cabinet_and_close_it
KITCHEN_SCENE1_open_the_bottom_drawer_of_the_cabinet
KITCHEN_SCENE1_open_the_top_drawer_of_the_cabinet
KITCHEN_SCENE1_open_the_top_drawer_of_the_cabinet_and_put_the_bowl_in_it
KITCHEN_SCENE1_put_the_black_bowl_on_the_plate
KITCHEN_SCENE1_put_the_black_bowl_on_top_of_the_cabinet
KITCHEN_SCENE2_open_the_top_drawer_of_the_cabinet
KITCHEN_SCENE2_put_the_black_bowl_at_the_back_on_the_plate
KITCHEN_SCENE2_put_the_black_bowl_at_the_front_on_the_plate
KITCHEN_SCENE2_put_the_middle_black_bowl_on_the_plate
KITCHEN_SCENE2_put_the_middle_black_bowl_on_top_of_the_cabinet
KITCHEN_SCENE2_stack_the_black_bowl_at_the_front_on_the_black_bowl_in_the_middle
KITCHEN_SCENE2_stack_the_middle_black_bowl_on_the_back_black_bowl
KITCHEN_SCENE3_put_the_frying_pan_on_the_stove
KITCHEN_SCENE3_put_the_moka_pot_on_the_stove
KITCHEN_SCENE3_turn_on_the_stove
KITCHEN_SCENE3_turn_on_the_stove_and_put_the_frying_pan_on_it
KITCHEN_SCENE4_close_the_bottom_drawer_of_the_cabinet
KITCHEN_SCENE4_close_the_bottom_drawer_of_the_cabinet_and_open_the_top_drawer
KITCHEN_SCENE4_put_the_black_bowl_in_the_bottom_drawer_of_the_cabinet
KITCHEN_SCENE4_put_the_black_bowl_on_top_of_the_cabinet
KITCHEN_SCENE4_put_the_wine_bottle_in_the_bottom_drawer_of_the_cabinet
KITCHEN_SCENE4_put_the_wine_bottle_on_the_wine_rack
KITCHEN_SCENE5_close_the_top_drawer_of_the_cabinet
KITCHEN_SCENE5_put_the_black_bowl_in_the_top_drawer_of_the_cabinet
KITCHEN_SCENE5_put_the_black_bowl_on_the_plate
KITCHEN_SCENE5_put_the_black_bowl_on_top_of_the_cabinet
KITCHEN_SCENE5_put_the_ketchup_in_the_top_drawer_of_the_cabinet
KITCHEN_SCENE6_close_the_microwave
KITCHEN_SCENE6_put_the_yellow_and_white_mug_to_the_front_of_the_white_mug
KITCHEN_SCENE7_open_the_microwave
KITCHEN_SCENE7_put_the_white_bowl_on_the_plate
KITCHEN_SCENE7_put_the_white_bowl_to_the_right_of_the_plate
KITCHEN_SCENE8_put_the_right_moka_pot_on_the_stove
KITCHEN_SCENE8_turn_off_the_stove
KITCHEN_SCENE9_put_the_frying_pan_on_the_cabinet_shelf
KITCHEN_SCENE9_put_the_frying_pan_on_top_of_the_cabinet
KITCHEN_SCENE9_put_the_frying_pan_under_the_cabinet_shelf
KITCHEN_SCENE9_put_the_white_bowl_on_top_of_the_cabinet
KITCHEN_SCENE9_turn_on_the_stove
KITCHEN_SCENE9_turn_on_the_stove_and_put_the_frying_pan_on_it
LIVING_ROOM_SCENE1_pick_up_the_alphabet_soup_and_put_it_in_the_basket
LIVING_ROOM_SCENE1_pick_up_the_cream_cheese_box_and_put_it_in_the_basket
LIVING_ROOM_SCENE1_pick_up_the_ketchup_and_put_it_in_the_basket
LIVING_ROOM_SCENE1_pick_up_the_tomato_sauce_and_put_it_in_the_basket
LIVING_ROOM_SCENE2_pick_up_the_alphabet_soup_and_put_it_in_the_basket
LIVING_ROOM_SCENE2_pick_up_the_butter_and_put_it_in_the_basket
LIVING_ROOM_SCENE2_pick_up_the_milk_and_put_it_in_the_basket
LIVING_ROOM_SCENE2_pick_up_the_orange_juice_and_put_it_in_the_basket
LIVING_ROOM_SCENE2_pick_up_the_tomato_sauce_and_put_it_in_the_basket
LIVING_ROOM_SCENE3_pick_up_the_alphabet_soup_and_put_it_in_the_tray
LIVING_ROOM_SCENE3_pick_up_the_butter_and_put_it_in_the_tray
LIVING_ROOM_SCENE3_pick_up_the_cream_cheese_and_put_it_in_the_tray
LIVING_ROOM_SCENE3_pick_up_the_ketchup_and_put_it_in_the_tray
LIVING_ROOM_SCENE3_pick_up_the_tomato_sauce_and_put_it_in_the_tray
LIVING_ROOM_SCENE4_pick_up_the_black_bowl_on_the_left_and_put_it_in_the_tray
LIVING_ROOM_SCENE4_pick_up_the_chocolate_pudding_and_put_it_in_the_tray
LIVING_ROOM_SCENE4_pick_up_the_salad_dressing_and_put_it_in_the_tray
LIVING_ROOM_SCENE4_stack_the_left_bowl_on_the_right_bowl_and_place_them_in_the_tray
LIVING_ROOM_SCENE4_stack_the_right_bowl_on_the_left_bowl_and_place_them_in_the_tray
LIVING_ROOM_SCENE5_put_the_red_mug_on_the_left_plate
LIVING_ROOM_SCENE5_put_the_red_mug_on_the_right_plate
LIVING_ROOM_SCENE5_put_the_white_mug_on_the_left_plate
LIVING_ROOM_SCENE5_put_the_yellow_and_white_mug_on_the_right_plate
LIVING_ROOM_SCENE6_put_the_chocolate_pudding_to_the_left_of_the_plate
LIVING_ROOM_SCENE6_put_the_chocolate_pudding_to_the_right_of_the_plate
LIVING_ROOM_SCENE6_put_the_red_mug_on_the_plate
LIVING_ROOM_SCENE6_put_the_white_mug_on_the_plate
STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_front_compartment_of_the_caddy
STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_left_compartment_of_the_caddy
STUDY_SCENE1_pick_up_the_book_and_place_it_in_the_right_compartment_of_the_caddy
STUDY_SCENE1_pick_up_the_yellow_and_white_mug_and_place_it_to_the_right_of_the_caddy
STUDY_SCENE2_pick_up_the_book_and_place_it_in_the_back_compartment_of_the_caddy
STUDY_SCENE2_pick_up_the_book_and_place_it_in_the_front_compartment_of_the_caddy
STUDY_SCENE2_pick_up_the_book_and_place_it_in_the_left_compartment_of_the_caddy
STUDY_SCENE2_pick_up_the_book_and_place_it_in_the_right_compartment_of_the_caddy
STUDY_SCENE3_pick_up_the_book_and_place_it_in_the_front_compartment_of_the_caddy
STUDY_SCENE3_pick_up_the_book_and_place_it_in_the_left_compartment_of_the_caddy
STUDY_SCENE3_pick_up_the_book_and_place_it_in_the_right_compartment_of_the_caddy
STUDY_SCENE3_pick_up_the_red_mug_and_place_it_to_the_right_of_the_caddy
STUDY_SCENE3_pick_up_the_white_mug_and_place_it_to_the_right_of_the_caddy
STUDY_SCENE4_pick_up_the_book_in_the_middle_and_place_it_on_the_cabinet_shelf
STUDY_SCENE4_pick_up_the_book_on_the_left_and_place_it_on_top_of_the_shelf
STUDY_SCENE4_pick_up_the_book_on_the_right_and_place_it_on_the_cabinet_shelf
STUDY_SCENE4_pick_up_the_book_on_the_right_and_place_it_under_the_cabinet_shelf
"""

SUITES: Mapping[str, tuple[str, ...]] = {
    "libero_spatial": tuple(_SPATIAL.split()),
    "libero_object": tuple(_OBJECT.split()),
    "libero_goal": tuple(_GOAL.split()),
    "libero_10": tuple(_10.split()),
    "libero_90": tuple(_90.split()),
}
"""Tasks by suite, in the library's order; libero_10 is what papers call LIBERO-Long."""
SUITE_OF = {task: suite for suite, tasks in SUITES.items() for task in tasks}
PRO_SUITES: Mapping[str, tuple[str, ...]] = {
    f"{suite}_{variant}": tuple(f"{suite}_{variant}/{task}" for task in SUITES[suite])
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    for variant in ("lan", "object", "swap", "task")
}
"""LIBERO-PRO's suites. Their files have the names of LIBERO's tasks, so that a task is named with its suite."""
ALL_SUITES = {**SUITES, **PRO_SUITES}
_ALL_TASKS = frozenset(task for tasks in ALL_SUITES.values() for task in tasks)
EXPERT_TASKS = (
    *SUITES["libero_spatial"],
    *SUITES["libero_object"],
    "put_the_bowl_on_the_stove",
    "put_the_wine_bottle_on_top_of_the_cabinet",
    "put_the_bowl_on_top_of_the_cabinet",
    "put_the_cream_cheese_in_the_bowl",
    "put_the_bowl_on_the_plate",
    "put_the_wine_bottle_on_the_rack",
)
"""The tasks that the scripted expert was tried on."""
MAX_STEPS: Mapping[str, Mapping[str, int]] = {
    "openvla": dict(zip(SUITES, (220, 280, 300, 520, 400), strict=True)),
    "lerobot": dict(zip(SUITES, (280, 280, 300, 520, 400), strict=True)),
    "rlinf": dict(zip(SUITES, (240, 240, 320, 480), strict=False)),
}
"""Limits of env steps of an episode, without settling steps, by protocol and suite. RLinf has published no limit for
libero_90."""
SETTLE_STEPS = {"openvla": 10, "lerobot": 10, "rlinf": 15}
"""Env steps without movement before an episode, by protocol."""
EPISODES_PER_TASK = {"openvla": 50, "lerobot": 10, "rlinf": 50}
"""Number of evaluated initial states of a task by protocol, beginning with the first published one."""


def suite_and_name(task: str) -> tuple[str, str]:
    """The suite of a task, and the name of its files there."""
    suite, _, name = task.rpartition("/")
    return suite or SUITE_OF[name], name


def sentence(task: str) -> str:
    """Instruction for the policy: the task's name without its scene, as in the library, or LIBERO-PRO's new sentence.
    Raises MissingAssetsError where that is not installed."""
    suite, name = suite_and_name(task)
    new = new_sentence(suite, name) if suite in PRO_SUITES else None
    return re.sub(r"^[A-Z_]+_SCENE\d+_", "", name).replace("_", " ") if new is None else new


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that `env.task` names: those of a suite, or of a comma-separated list. Raises UnknownEnvError."""
    return named_tasks(name, _ALL_TASKS, ALL_SUITES, "suite")


def max_steps(tasks: tuple[str, ...], protocol: str) -> int | None:
    """The largest limit of these tasks; None if the protocol has no limit for one of them."""
    limits = [MAX_STEPS[protocol].get(SUITE_OF[suite_and_name(task)[1]]) for task in tasks]
    return None if None in limits else max(limit for limit in limits if limit is not None)
