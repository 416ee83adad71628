#!/bin/bash
# A private systemd as process 1 of new namespaces, over an overlay of this machine's root, with
# tierkv installed. Nothing it does is seen outside. To end it, kill this process: all others go
# with it, and what they had mounted.
#
# Needs: CGROUP    an empty cgroup (v2) directory of its own
#        WORK      an empty directory
#        CODE      the checkout
#        SITE      a directory with the packages that the daemon imports
#        PYTHON    the prefix of the interpreter that those were installed for
#        INSTALLED a directory with what `tierkv unit install` wrote
set -eu
export CGROUP WORK CODE SITE PYTHON INSTALLED
echo $$ > "$CGROUP/cgroup.procs"
exec unshare --mount --pid --fork --cgroup --uts --ipc --net --kill-child --propagation private \
  bash -euc '
root=$WORK/root
mount -t tmpfs tmpfs "$WORK"
mkdir "$WORK"/{upper,work,root}
mount -t overlay -o "lowerdir=/,upperdir=$WORK/upper,workdir=$WORK/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for name in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$name"; done
chmod 1777 "$root/tmp"
for name in null zero full random urandom tty; do
  touch "$root/dev/$name"
  mount --bind "/dev/$name" "$root/dev/$name"
done
touch "$root/dev/console"
mount --bind /dev/null "$root/dev/console"
mkdir "$root"/dev/{shm,pts,mqueue,hugepages}
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mkdir -p "$root/run/units/multi-user.target.wants"
for name in sysinit basic sockets paths timers slices shutdown umount final exit local-fs \
  local-fs-pre swap multi-user network; do
  cp "/lib/systemd/system/$name.target" "$root/run/units/"
done
cp /lib/systemd/system/systemd-exit.service "$root/run/units/"
: > "$root/etc/machine-id"

# The checkout and the interpreter may lie below /root or /home, which the unit hides.
mkdir -p "$root"/opt/tierkv/{code,site,python}
mount --bind "$CODE" "$root/opt/tierkv/code"
mount --bind "$SITE" "$root/opt/tierkv/site"
mount --bind "$PYTHON" "$root/opt/tierkv/python"
rm -f "$root/usr/bin/tierkv"
cat > "$root/usr/bin/tierkv" <<"COMMAND"
#!/bin/sh
cd /opt/tierkv
export PYTHONPATH=code:code/wal:code/kernels:site LD_LIBRARY_PATH=python/lib
exec python/bin/python3 -P -m tierkv "$@" 2>> "$STATE_DIRECTORY/log"
COMMAND
chmod 755 "$root/usr/bin/tierkv"
# What tierkv unit install wrote: units, drop-ins and the user of the daemon.
systemd-sysusers --root="$root" "$INSTALLED/etc/sysusers.d/tierkv.conf"
mkdir -p "$root/etc/tierkv"
cp "$INSTALLED/etc/tierkv/tierkv.toml" "$root/etc/tierkv/tierkv.toml"
chmod 644 "$root/etc/tierkv/tierkv.toml"
cp -r "$INSTALLED"/etc/systemd/system/. "$root/run/units/"
mkdir -p "$root/run/units/sockets.target.wants"
ln -s ../tierkv.service "$root/run/units/multi-user.target.wants/"
for name in tierkv tierkv-metrics; do
  ln -s "../$name.socket" "$root/run/units/sockets.target.wants/"
done

cd "$root"
mkdir .old
pivot_root . .old
umount --lazy /.old
export container=tierkv-test SYSTEMD_UNIT_PATH=/run/units
exec /lib/systemd/systemd --system --unit=multi-user.target --log-target=console'
