"""The transformers connector: prefixes of models that generate with a DynamicCache."""

from kvstore.client.engines.transformers.connector import Generation, TransformersConnector
from kvstore.client.engines.transformers.identity import representation_of

__all__ = ["Generation", "TransformersConnector", "representation_of"]
