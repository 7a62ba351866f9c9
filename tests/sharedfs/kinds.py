"""The kinds of shared filesystems that tests and benchmarks use, by what their hosts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sharedfs.ceph import CephFS
from tests.sharedfs.filesystems import Bindfs, GlusterFS, MooseFS
from tests.sharedfs.nfs import NFS3, NFS42, NFS3Cached

if TYPE_CHECKING:
    from tests.sharedfs.filesystems import Filesystem

FUSE_KINDS: tuple[type[Filesystem], ...] = (GlusterFS, MooseFS, CephFS, Bindfs)
"""Hosts are namespaces."""
NFS_KINDS: tuple[type[Filesystem], ...] = (NFS3, NFS42, NFS3Cached)
"""Hosts are kernels."""
