"""The number of parameters of a model of Transformers, from its config.json.

Law: the model is built on torch's meta device, so no memory is taken for its parameters. No code of the model's own is
run and nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.errors import ConfigError


def parameters_of(config: Path) -> int:
    """The number of parameters of the language model that this config.json describes; tied ones count once.

    Raises:
        ConfigError: Transformers isn't installed, or the file describes no model that it knows.
    """
    key = "--model"
    try:
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        mend = "give the number with --params, or install it: pip install 'p2p-diloco[hf]'"
        raise ConfigError(f"needs {error.name}, which isn't installed", key=key, value=config, mend=mend) from None
    try:
        described = AutoConfig.from_pretrained(str(config), trust_remote_code=False)
        causal = any("CausalLM" in name or "LMHead" in name for name in described.architectures or ["CausalLM"])
        with torch.device("meta"):
            model = (AutoModelForCausalLM if causal else AutoModel).from_config(described)
    except Exception as error:  # each model raises errors of its own
        wrong = f"describes no model that Transformers can build ({type(error).__name__}: {str(error)[:80]})"
        raise ConfigError(
            wrong, key=key, value=config, mend="give the number of trained parameters with --params"
        ) from None
    return sum(parameter.numel() for parameter in model.parameters())
