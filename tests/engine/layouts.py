"""The parallel layouts that the engine is tested on, and the models that each one runs."""

from spark_megatron.engine.parallel import Layout

DENSE = ("llama3", "qwen2", "qwen3")
"""Untied with scaled rotary embeddings; tied with biases; tied with query and key norms and an own head_dim."""

LAYOUTS: dict[str, tuple[int, Layout, tuple[str, ...]]] = {
    "single": (1, Layout(), (*DENSE, "llama", "qwen2_untied", "qwen3_moe", "qwen3_moe_mixed")),
    "tp2": (2, Layout(tensor=2), DENSE),
    "tp2_sp": (2, Layout(tensor=2, sequence=True), (*DENSE, "qwen3_moe")),
    "pp2": (2, Layout(pipeline=2), (*DENSE, "qwen3_moe_mixed")),
    "pp2_vp2": (2, Layout(pipeline=2, virtual=2), DENSE),
    "cp2": (2, Layout(context=2), DENSE),
    "dp2": (2, Layout(), (*DENSE, "qwen3_moe_mixed")),
    "ep2": (2, Layout(expert=2), ("qwen3_moe",)),
    "tp4": (4, Layout(tensor=4), ("qwen2",)),  # two heads of keys and values: fewer than ranks
    "tp4_sp": (4, Layout(tensor=4, sequence=True), ("qwen3",)),
    "pp4": (4, Layout(pipeline=4), ("qwen2",)),
    "pp4_ends": (4, Layout(pipeline=4), ("llama_deep",)),  # 1, 2, 2 and 1 layers
    "cp4": (4, Layout(context=4), ("llama3",)),
    "dp4": (4, Layout(), ("qwen3",)),
    "ep4": (4, Layout(expert=4), ("qwen3_moe",)),
    "tp2_sp_pp2": (4, Layout(tensor=2, sequence=True, pipeline=2), ("qwen2", "qwen3_moe")),
    "tp2_pp2_vp2": (4, Layout(tensor=2, pipeline=2, virtual=2), ("qwen3",)),
    "tp2_cp2": (4, Layout(tensor=2, sequence=True, context=2), ("qwen2",)),
    "tp2_dp2": (4, Layout(tensor=2), ("llama3",)),
    "pp2_cp2": (4, Layout(pipeline=2, context=2), ("qwen2",)),
    "pp2_vp2_dp2": (4, Layout(pipeline=2, virtual=2), ("llama3",)),
    "cp2_dp2": (4, Layout(context=2), ("qwen3",)),
    "ep2_tp2_sp": (4, Layout(tensor=2, sequence=True, expert=2), ("qwen3_moe_mixed",)),
    "ep2_pp2": (4, Layout(pipeline=2, expert=2), ("qwen3_moe_mixed",)),
    "ep2_cp2": (4, Layout(context=2, expert=2), ("qwen3_moe",)),
    "ep2_dp4": (4, Layout(expert=2), ("qwen3_moe",)),
}
"""Name -> (ranks, layout, models)."""

CASES = [(layout, model) for layout, (_, _, models) in LAYOUTS.items() for model in models]
MODELS = tuple(dict.fromkeys(model for _, model in CASES))

SCORE_LAYOUTS: dict[str, tuple[int, Layout, tuple[str, ...]]] = {
    "single": (1, Layout(), ("qwen2", "llama3", "classifier", "qwen3_moe")),
    "tp2": (2, Layout(tensor=2), ("qwen2", "classifier")),
    "tp2_sp": (2, Layout(tensor=2, sequence=True), ("llama3",)),
    "pp2": (2, Layout(pipeline=2), ("qwen2", "classifier")),
    "pp2_vp2": (2, Layout(pipeline=2, virtual=2), ("qwen2",)),
    "cp2": (2, Layout(context=2), ("qwen2",)),
    "dp2": (2, Layout(), ("classifier",)),
    "ep2": (2, Layout(expert=2), ("qwen3_moe",)),
    "tp2_sp_pp2": (4, Layout(tensor=2, sequence=True, pipeline=2), ("qwen2",)),
    "tp2_cp2": (4, Layout(tensor=2, sequence=True, context=2), ("llama3",)),
    "cp2_dp2": (4, Layout(context=2), ("qwen2",)),
    "pp2_cp2": (4, Layout(pipeline=2, context=2), ("classifier",)),
}
"""The same for models with a scalar head: "classifier" has one already, the others get one."""
