"""From a model's name on the command line to a module.

``gpt:SIZE`` names the built-in GPT. ``package.module:function`` names a function of the user's that returns an
``nn.Module``; it may take a ``seq_len`` argument. The path of a Hugging Face ``config.json`` names the causal language
model that it describes. The module is called as ``module(tokens, targets)`` with int64
tensors [B, T] of byte values (0-255) and answers with a scalar loss, a tuple whose first item is the loss, or an
object with a ``loss`` attribute.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardledger.errors import ConfigError
from shardledger.workload.gpt import GPT, SIZES, gpt_config
from shardledger.workload.hugging_face import hugging_face_factory, is_hugging_face

ModelFactory = Callable[[int], nn.Module]  # seq_len -> module


def find_model(name: str) -> ModelFactory:
    """The function behind a model's name, found but not called: wrong names fail before any rank is started.

    Raises:
        ConfigError: unknown size, no such module or function, or not a name of either form.
    """
    if is_hugging_face(name):
        build = hugging_face_factory(name)
        return lambda seq_len: build()
    kind, colon, rest = name.partition(":")
    if not colon or not kind or not rest:
        raise ConfigError(
            f"model {name!r} is not a model's name; write gpt:SIZE (SIZE one of {', '.join(SIZES)}), "
            "package.module:function, or the path of a Hugging Face config.json."
        )
    if kind.lower() == "gpt":
        gpt_config(rest)  # raises for an unknown size
        return lambda seq_len: GPT(gpt_config(rest, context=seq_len))
    return _user_factory(name, kind, rest)


def load_model(name: str, seq_len: int) -> nn.Module:
    """Build the model called ``name`` for sequences of ``seq_len`` bytes.

    Raises:
        ConfigError: as ``find_model``; also when the user's function returns something else than an nn.Module.
    """
    return find_model(name)(seq_len)


def loss_of(output: Any) -> Tensor:
    """The scalar loss in what a model returned: itself, the first item of a tuple, or its ``loss`` attribute.

    Raises:
        ConfigError: there is no scalar in any of these places.
    """
    found = output
    if isinstance(output, (tuple, list)) and output:
        found = output[0]
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        found = output.loss
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    raise ConfigError(
        f"the model returned {what} where a scalar loss is expected; module(tokens, targets) must return the loss, "
        "a tuple with the loss first, or an object with .loss."
    )


def _user_factory(name: str, module_name: str, function_name: str) -> ModelFactory:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a parent package is missing; anything else is missing inside the user's module.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ConfigError(f"model {name!r}: importing {module_name} failed: {error}.") from error
        raise ConfigError(
            f"model {name!r}: there is no module {module_name!r}; run from the folder that holds it, "
            "or put that folder on PYTHONPATH."
        ) from error
    except Exception as error:
        raise ConfigError(f"model {name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(function_name, callables, n=1, cutoff=0.5)
        hint = f" Did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"model {name!r}: module {module_name} has no function {function_name!r}.{hint}")
    return lambda seq_len: _call(name, function, seq_len)


def _call(name: str, function: Callable[..., Any], seq_len: int) -> nn.Module:
    given: dict[str, int] = {}
    try:
        signature = inspect.signature(function)
        given = {"seq_len": seq_len} if "seq_len" in signature.parameters else {}
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"model {name!r}: it is called with {'seq_len alone' if given else 'no arguments'}, which it does not take: "
            f"{error}. Name a function that returns the whole model."
        ) from None
    except ValueError:  # some callables of C have no signature
        pass
    model = function(**given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r}: it returned a value of type {type(model).__name__}, not a torch.nn.Module.")
    return model
