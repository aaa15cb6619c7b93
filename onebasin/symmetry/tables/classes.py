# SPDX-License-Identifier: Apache-2.0
"""Equivalence classes that are joined two at a time (union-find)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Classes(Generic[K]):
    """Classes of keys, in the order in which the keys came; every key begins as a class of its own."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        self.parent = {key: key for key in keys}

    def find(self, key: K) -> K:
        """Return the key that represents the class of `key`, which may be new."""
        while self.parent.setdefault(key, key) != key:
            key = self.parent[key]
        return key

    def join(self, one: K, other: K) -> None:
        """Join the class of `other` to that of `one`, which keeps its representative."""
        self.parent[self.find(other)] = self.find(one)

    def all(self) -> list[list[K]]:
        """Return all classes."""
        found: dict[K, list[K]] = {}
        for key in self.parent:
            found.setdefault(self.find(key), []).append(key)
        return list(found.values())
