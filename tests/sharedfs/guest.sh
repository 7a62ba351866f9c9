#!/bin/bash
# The first process of a guest kernel. Its root is the machine's, read-only through hostfs, with a layer in
# memory above it. The kernel passes as environment: NAME, BOOT (its number), ADDRESS,
# GATEWAY, ROLE (server or client), LEASE and GRACE (see nfsd.sh), PYTHON.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
modules=/usr/lib/uml/modules/$(uname -r)

if [[ ${1-} != rooted ]]; then
  insmod "$modules/kernel/fs/overlayfs/overlay.ko"
  mount -t tmpfs -o size=300m tmpfs /mnt
  mkdir /mnt/upper /mnt/work /mnt/root
  mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
  cd /mnt/root
  mount -t proc proc proc
  mount -t sysfs sys sys
  mount -t devtmpfs dev dev
  mkdir -p dev/pts dev/shm old
  mount -t devpts pts dev/pts
  mount -t tmpfs shm dev/shm
  mount -t tmpfs run run
  # The one directory of the machine that the guest writes to.
  mkdir run/rehearsal
  # Kernels before 6.10 take the path alone.
  mount -t hostfs none run/rehearsal -o hostfs=/run/rehearsal 2>/dev/null ||
    mount -t hostfs none run/rehearsal -o /run/rehearsal
  mount --bind "run/rehearsal/trace/$NAME.$BOOT" run/rehearsal/trace/own
  pivot_root . old
  exec chroot . /bin/bash /run/rehearsal/guest.sh rooted
fi

umount --lazy /old
mkdir -p /usr/lib/modules
ln -sfn "$modules" "/usr/lib/modules/$(uname -r)"
hostname "$NAME"
echo "127.0.0.1 localhost $NAME" >/etc/hosts
echo "hosts: files" >/etc/nsswitch.conf
ip link set lo up
ip address add "$ADDRESS" dev vec0
# User-mode Linux truncates some of the packets that it has to split: reads of a file went at 0.2 MB/s.
ip link set vec0 gso_max_size 1500 gso_max_segs 1 up
ip route add default via "$GATEWAY"
ulimit -n 65536
# What is not synced leaves a guest late, and always equally late. By default the first change after a pause
# may leave after 5 s or after 35 s, which depends on what the mount has written before.
echo 3000 >/proc/sys/vm/dirty_writeback_centisecs

rm -rf /var/lib/nfs
mkdir -p /run/rpcbind /run/sendsigs.omit.d /var/lib/nfs/{sm,sm.bak,v4recovery,rpc_pipefs,nfsdcld,nfsdcltrack}
touch /var/lib/nfs/{rmtab,etab,state}
chown -R statd /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/state
if [[ $ROLE == server ]]; then
  mkdir -p /srv/disk /srv/export
  mount /dev/ubda /srv/disk
  # A server remembers over a power cut who held locks.
  [[ -d /srv/disk/nfs ]] || cp -a /var/lib/nfs /srv/disk/nfs
  mkdir -p /srv/disk/export
  mount --bind /srv/disk/nfs /var/lib/nfs
  mount --bind /srv/disk/export /srv/export
  modprobe nfsd
  mount -t nfsd nfsd /proc/fs/nfsd
  rm -rf /etc/exports.d
  echo "/srv/export *(rw,sync,no_subtree_check,no_root_squash,fsid=0,insecure)" >/etc/exports
else
  modprobe -a nfs nfsv3 nfsv4 lockd
  # As docs/how-to/doctor.md advises: with its default, clients of Linux 7.2 wait for each other for minutes.
  delegations=/sys/module/nfsv4/parameters/directory_delegations
  [[ ! -e $delegations ]] || echo N >$delegations
fi
mount -t rpc_pipefs pipefs /var/lib/nfs/rpc_pipefs
rpcbind -w
rpc.statd
if [[ $ROLE == server ]]; then
  nfsdcld -p /var/lib/nfs/rpc_pipefs # remembers NFSv4 clients over a restart; without it newer kernels wait for a whole grace period
  /bin/bash /run/rehearsal/nfsd.sh "$LEASE" "$GRACE"
  rpc.mountd
fi
"$PYTHON" -I -S /run/rehearsal/agent.py serve &
# Orphans are ours to reap.
while :; do wait -n || sleep 1; done
