"""The kinds of shared filesystems that tests and benchmarks use, by what their hosts are."""

from __future__ import annotations

from tests.sharedfs.ceph import CephFS
from tests.sharedfs.filesystems import Bindfs, Filesystem, GlusterFS, MooseFS
from tests.sharedfs.nfs import NFS3, NFS42, NFS3Cached

FUSE_KINDS: tuple[type[Filesystem], ...] = (GlusterFS, MooseFS, CephFS, Bindfs)
"""Hosts are namespaces."""
NFS_KINDS: tuple[type[Filesystem], ...] = (NFS3, NFS42, NFS3Cached)
"""Hosts are kernels."""
