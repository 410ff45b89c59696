"""Calls of transformers and the hub without their output, and with errors in one line."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from harness.config import ModelConf
from harness.models.memory import is_out_of_memory
from harness.records import UserError, first_line


@contextmanager
def explained(conf: ModelConf, key: str) -> Iterator[None]:
    """Turn what transformers and the hub raise into one line that says what to do."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{key}.id={conf.id}: {first_line(error)}") from error
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise UserError(
            f"{key}.id={conf.id}: a file of its weights is damaged or cut short "
            f"({first_line(error)}); download or save it again"
        ) from error
    except StrictDataclassError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200].rstrip(".")
        raise UserError(f"{key}.id={conf.id}: its config.json cannot be used ({reason})") from error
    except (MemoryError, OSError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{key}.id={conf.id}: does not fit the device's memory; use a smaller model, "
                f"{key}.dtype=bfloat16, {key}.quantization=int4 or {key}.device_map=auto"
            ) from error
        if not conf.allow_pickle and "model.safetensors" in str(error):
            raise UserError(
                f"{key}.id={conf.id}: no *.safetensors there; weights are not read from pickles "
                f"(pytorch_model.bin) unless you trust them: {key}.allow_pickle=true"
            ) from error
        raise UserError(
            f"{key}.id={conf.id}: cannot be loaded ({first_line(error)}); give a local folder "
            f"({key}.id=/path/to/model), a hub id that exists and is reachable, or fill the hub "
            f"cache where there is network (hf download {conf.id}) and set HF_HUB_OFFLINE=1"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off the progress bars and advice of transformers and the hub."""
    before = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(before)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
