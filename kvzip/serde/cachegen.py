"""LMCache's CacheGen serializer and deserializer on kvzip's kernels."""

from __future__ import annotations

from typing import Any

from kvzip.devices import get_device
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from kvzip.lmcache import cachegen
from kvzip.lmcache.blob import read_blob, write_blob
from kvzip.serde.base import Deserializer, Serializer, as_cache, like_dtype, numpy_dtype
from kvzip.serde.config import CacheGenConfig


class CacheGenSerializer(Serializer):
    """Writes the blobs that LMCache 0.5.6 writes and loads; unlike its own, no stream is ever cut.

    Args:
        config: a :class:`CacheGenConfig`, or LMCache's engine configuration, which is not looked at.
        metadata: anything with a ``model_name``, from which the configuration follows if none is given.
        device: where the kernels run.
    """

    def __init__(self, config: Any = None, metadata: Any = None, *, device: str | Device = "cpu") -> None:
        self.cachegen_config = _config_of(config, metadata)
        self.key_bins, self.value_bins = self.cachegen_config.bins()
        self._device = device

    def to_bytes(self, t: Any) -> bytes:
        kv, device = as_cache(t), _device_of(self._device)
        if len(kv) != self.cachegen_config.nlayers:
            raise UsageError(
                f"the cache has {len(kv)} layers, the configuration is for {self.cachegen_config.nlayers}",
                code="bad-layers",
            )
        return write_blob(cachegen.encode(kv, self.key_bins, self.value_bins, device))


class CacheGenDeserializer(Deserializer):
    """Reads the blobs of LMCache and of :class:`CacheGenSerializer`; what a blob says is not run.

    Args:
        config, metadata, device: as for :class:`CacheGenSerializer`.
        dtype: as for :class:`kvzip.serde.Deserializer`.
    """

    def __init__(
        self, config: Any = None, metadata: Any = None, dtype: Any = None, *, device: str | Device = "cpu"
    ) -> None:
        super().__init__(dtype)
        self.cachegen_config = _config_of(config, metadata)
        self.key_bins, self.value_bins = self.cachegen_config.bins()
        self._device = device

    def from_bytes(self, bs: bytes) -> Any:
        blob, device = read_blob(bytes(bs)), _device_of(self._device)
        if blob.layers != self.cachegen_config.nlayers:
            raise UsageError(
                f"the blob has {blob.layers} layers, the configuration is for {self.cachegen_config.nlayers}",
                code="bad-layers",
            )
        kv = cachegen.decode(blob, self.key_bins, self.value_bins, device, numpy_dtype(self.dtype))
        return like_dtype(kv, self.dtype)


def _config_of(config: Any, metadata: Any) -> CacheGenConfig:
    if isinstance(config, CacheGenConfig):
        return config
    name = getattr(metadata, "model_name", None)
    if not isinstance(name, str):
        raise UsageError("pass a CacheGenConfig, or metadata with a model_name", code="no-config")
    return CacheGenConfig.from_model_name(name)


def _device_of(device: str | Device) -> Device:
    return device if isinstance(device, Device) else get_device(device)
