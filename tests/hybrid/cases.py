"""Which layouts of the trainer hand over to which samplers in the tests."""

from spark_megatron.architecture import Layout

Key = tuple[str, str, int]
"""Model, precision, ranks per sampler."""

CASES: dict[int, dict[Key, list[Layout]]] = {
    2: {
        ("qwen2", "fp32", 1): [Layout(tensor=2), Layout(pipeline=2), Layout()],
        ("qwen2", "fp32", 2): [Layout(pipeline=2), Layout(tensor=2)],
        ("qwen2_untied", "bf16", 1): [Layout(tensor=2), Layout(pipeline=2)],
        ("qwen3_moe_mixed", "fp32", 2): [Layout(expert=2)],
    },
    4: {
        ("qwen3", "fp32", 1): [Layout(tensor=2, pipeline=2), Layout(pipeline=4)],
        ("llama", "fp32", 2): [Layout(tensor=4), Layout(pipeline=2, virtual=2), Layout(context=2)],
        ("qwen2", "fp32", 4): [Layout(pipeline=4), Layout(tensor=2)],  # two key-value heads: fewer than ranks
        ("qwen3_moe", "fp32", 1): [Layout(expert=4), Layout(tensor=2, sequence=True, expert=2)],
        ("qwen3_moe", "bf16", 2): [Layout(pipeline=2, expert=2), Layout(tensor=2, sequence=True, pipeline=2)],
    },
}
"""World size -> sampler -> trainer layouts: some of each kind; the tests of the plan have all pairs."""
