"""Names from other search libraries, and Weft's equivalents, for error messages.

The names are those of tree-of-thoughts, llm-reasoners, TreeQuest, LATS, saplings and the papers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

# Keys have no upper case and no underscores.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "best_of_n(lm, prompt, n=16)": (
        "bestof",
        "bestofk",
        "bon",
        "majority",
        "majorityvote",
        "repeatedsampling",
        "sample",
        "selfconsistency",
        "vote",
    ),
    "tot(lm, prompt, breadth=5)": (
        "bfs",
        "bfsalgo",
        "breadthfirst",
        "solve",
        "totagent",
        "totbfs",
        "treeofthought",
        "treeofthoughts",
        "treeofthoughtsbfsalgo",
        "treesearch",
    ),
    'tot(lm, prompt, order="dfs")': ("depthfirst", "dfs", "dfsagent", "totdfs", "totdfsagent"),
    "mcts(lm, prompt)": (
        "lats",
        "montecarlo",
        "montecarloagent",
        "montecarlotreesearch",
        "rap",
        "rstar",
        "standardmcts",
        "uct",
    ),
    "beam(lm, prompt, width=8)": ("beamsearch", "guidedbeam", "stepbeam"),
    "smc(lm, prompt, n=32)": (
        "importancesampling",
        "particlefilter",
        "particlefiltering",
        "particles",
        "sequentialmontecarlo",
        "smcstandard",
        "twistedsmc",
    ),
    "adaptive(lm, prompt)": ("abmcts", "abmctsa", "abmctsm", "multillmabmcts", "thompson"),
    "greedy(lm, prompt)": ("cot", "chainofthought", "greedysearch"),
    "a search with propose= and score=, such as tot or mcts": (
        "agent",
        "algorithm",
        "reasoner",
        "search",
        "searchalgorithm",
        "searchconfig",
        "worldmodel",
    ),
    "verifier=, value= or score= of any search": ("evaluator", "rewardmodel", "scorer"),
    "SearchResult": ("mctsresult", "result", "searchoutput"),
    "resume= of any search, a file to go on from": ("checkpoint", "load", "save"),
}
# Other libraries' option → Weft's options; errors name the first that the search accepts.
_OPTIONS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("value",): (
        "critic",
        "evaluate",
        "evaluate_fn",
        "evaluation_fn",
        "evaluator",
        "heuristic",
        "heuristic_fn",
        "judge",
        "method_evaluate",
        "rank",
        "reward",
        "reward_fn",
        "reward_model",
        "scorer",
        "scoring_fn",
        "state_evaluator",
        "value_fn",
    ),
    ("propose",): (
        "action_fn",
        "actions",
        "expand",
        "expand_fn",
        "generate",
        "generate_fn",
        "generator",
        "get_actions",
        "method_generate",
        "policy",
        "proposal",
        "proposer",
        "thought_generator",
    ),
    ("verifier",): (
        "check",
        "checker",
        "goal",
        "goal_test",
        "is_correct",
        "is_goal",
        "is_solved",
        "is_terminal",
        "stop_fn",
        "verify",
    ),
    ("state",): ("init_state", "initial_state", "start", "start_state", "world_model"),
    ("depth",): ("depth_limit", "max_depth", "max_levels", "max_steps", "n_levels", "n_steps"),
    ("breadth", "width", "batch"): (
        "b",
        "b_factor",
        "beam_size",
        "beam_width",
        "breadth_limit",
        "n_beams",
        "n_select_sample",
        "num_beams",
    ),
    ("width", "batch"): ("breadth",),
    ("breadth", "batch"): ("width",),
    ("n_continue", "n", "widen"): (
        "branching",
        "branching_factor",
        "candidates",
        "n_actions",
        "n_candidates",
        "n_generate_sample",
        "n_proposals",
        "n_samples",
        "num_candidates",
        "num_samples",
        "num_thoughts",
        "number_of_agents",
    ),
    ("n",): ("best_of", "n_particles", "num_particles", "particles"),
    ("ess",): ("ess_threshold", "resample_threshold"),
    ("potential", "value"): ("critics", "log_potential", "potentials", "twist"),
    ("rounds", "n"): (
        "iterations",
        "max_iterations",
        "max_loops",
        "n_iterations",
        "n_iters",
        "n_simulations",
        "num_iterations",
        "num_simulations",
        "simulations",
    ),
    ("rollouts",): ("n_rollouts", "num_rollouts", "simulate"),
    ("exploration",): (
        "c",
        "c_puct",
        "cpuct",
        "exploration_constant",
        "exploration_weight",
        "ucb_c",
        "w_exp",
    ),
    ("extract",): ("answer_extractor", "extract_answer", "extractor", "parse_answer", "parser"),
    ("budget_tokens",): ("budget", "max_total_tokens", "token_budget", "token_limit"),
    ("budget_s",): ("deadline", "max_seconds", "max_time", "time_budget", "time_limit", "timeout"),
    ("progress",): ("callback", "callbacks", "on_round", "on_step"),
    ("resume",): ("checkpoint", "checkpoint_path", "save_path"),
    ("line_constraint", "constraint"): ("line_grammar", "step_constraint"),
}
_ATTRIBUTES: Mapping[str, str] = {
    "completion": "text",
    "output": "text",
    "solution": "text",
    "best_node": "best",
    "node": "best",
    "best_path": "best.path",
    "path": "best.path",
    "trace": "best.path",
    "reward": "best.score",
    "score": "best.score",
    "value": "best.score",
    "is_correct": "solved",
    "success": "solved",
    "terminal_state": "state",
    "root": "loom",
    "tree": "loom",
    "tree_state": "loom",
    "nodes": "loom.walk()",
    "samples": "loom.leaves, or particles of smc",
    "weights": "particles, each with a weight",
    "usage": "cost",
}


def function_for(name: str) -> str | None:
    """Return the `weft.search` function for another library's name of it ("MCTS"), or None."""
    plain = name.replace("_", "").lower()
    return next((here for here, others in _FUNCTIONS.items() if plain in others), None)


def options_for(accepted: Container[str]) -> dict[str, str]:
    """Return a mapping from other libraries' option names to Weft's.

    accepted: the options that a search accepts; the mapping contains only these.
    """
    answers: dict[str, str] = {}
    for options, others in _OPTIONS.items():
        here = next((option for option in options if option in accepted), None)
        if here is not None:
            answers.update(
                dict.fromkeys((other for other in others if other not in accepted), here)
            )
    return answers


def attribute_for(name: str) -> str | None:
    """Return the `SearchResult` attribute for another library's name of it, or None."""
    return _ATTRIBUTES.get(name)
