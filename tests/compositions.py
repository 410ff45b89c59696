"""Configurations as Hydra composes them, faster: what no value decides is composed once.

A composition takes 0.14 s, and nearly every test that runs a command makes several. Which files it
is made of depends on the words that choose from groups (model=, draft=); the others set values in
it, by the function with which Hydra sets them. `tests/test_config.py` holds these compositions
against Hydra's; what runs through `harness.cli.run_app` is composed by Hydra alone.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness import cli
from harness.config import CONF_DIR

by_hydra = cli._composed


@lru_cache(maxsize=512)
def _of_groups(command: str, words: tuple[str, ...]) -> DictConfig:
    return by_hydra(command, words)


def composed(command: str, words: Sequence[str]) -> DictConfig:
    """What `harness.cli._composed` returns, and the errors that it raises."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    values = [override for override in parsed if _sets_a_value(override)]
    groups = tuple(o.input_line or "" for o in parsed if not _sets_a_value(o))
    config = copy.deepcopy(_of_groups(command, groups))
    try:
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException from error
    return config


def _sets_a_value(override: Override) -> bool:
    key = override.key_or_group
    return (
        override.type == OverrideType.CHANGE
        and override.package is None
        and not override.is_sweep_override()
        and not key.startswith("hydra")
        and not (CONF_DIR / key).is_dir()
    )
