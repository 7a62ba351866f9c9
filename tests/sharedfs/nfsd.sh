#!/bin/bash
# In the server's guest: serve, with a lease of so many seconds, after an orderly end if it serves already.
set -eu
served=$(cat /proc/fs/nfsd/threads)
rpc.nfsd 0
echo "$1" >/proc/fs/nfsd/nfsv4leasetime
# As long as a lease, or clients could not reclaim in time what they had.
echo "$1" >/proc/fs/nfsd/nfsv4gracetime
echo "$1" >/proc/sys/fs/nfs/nlm_grace_period
exportfs -ra
rpc.nfsd 8
# Clients of NFSv3 reclaim their locks when they are told of the restart; rpc.statd tells them at a boot.
if ((served)); then sm-notify -f; fi
