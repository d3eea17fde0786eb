"""What did the user ask? DeepSpeed's JSON, read strictly: ``load_config`` returns a frozen ``Config``."""

from shardledger.config.load import load_config
from shardledger.config.model import Config

__all__ = ["Config", "load_config"]
