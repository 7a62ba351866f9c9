#!/bin/bash
# nfsd.sh LEASE GRACE, in the server's guest: serve with these times in seconds; if it serves already, end that in
# order first. The server keeps what a lost NFSv4 client held for a lease. After a start it grants no new locks
# and opens for the grace period, in which clients reclaim what they had.
set -eu
served=$(cat /proc/fs/nfsd/threads)
rpc.nfsd 0
echo "$1" >/proc/fs/nfsd/nfsv4leasetime
echo "$2" >/proc/fs/nfsd/nfsv4gracetime
echo "$2" >/proc/sys/fs/nfs/nlm_grace_period
exportfs -ra
rpc.nfsd 8
# Clients of NFSv3 reclaim their locks when they are told of the restart; rpc.statd tells them at a boot.
if ((served)); then sm-notify -f; fi
