#!/usr/bin/env bash
# Pid 1 of one host of the lab (hosts.py): own net, mount, pid, uts and ipc namespaces.
# Arguments: NAME ADDRESS LAB PEERS KEEP; KEEP: paths, separated by ':', that stay visible when they lie below /tmp.
set -euo pipefail
name=$1 address=$2 lab=$3 peers=$4 keep=$5
home=$lab/$name/home etc=$lab/$name/etc
export HOME=$home
hostname "$name"

# what a machine has of its own: home, names of the others, /run, /dev/shm, /tmp
sed "s#^root:.*#root:x:0:0:root:$home:/bin/bash#" /etc/passwd >"$etc/passwd"
{ echo "127.0.0.1 localhost"; tr ' ' '\n' <<<"$peers" | tr '=' ' '; } >"$etc/hosts"
: >"$etc/resolv.conf"  # no DNS: look-ups fail at once
for file in passwd hosts resolv.conf; do mount --bind "$etc/$file" "/etc/$file"; done
mount -t tmpfs -o mode=755,size=16m tmpfs /run
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mkdir -p /run/sshd /run/keep
IFS=: read -ra kept <<<"$keep"
for i in "${!kept[@]}"; do
  case ${kept[i]} in /tmp/*) mkdir "/run/keep/$i"; mount --bind "${kept[i]}" "/run/keep/$i" ;; esac
done
mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp  # empty after each boot
for i in "${!kept[@]}"; do
  case ${kept[i]} in /tmp/*) mkdir -p "${kept[i]}"; mount --move "/run/keep/$i" "${kept[i]}" ;; esac
done

ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done  # plugged in from outside
ip addr add "$address/24" dev eth0
ip link set eth0 up

cat >"$etc/sshd_config" <<C
ListenAddress $address
HostKey $etc/host_key
PidFile none
AuthorizedKeysFile $lab/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100:30:200
MaxSessions 100
UseDNS no
SetEnv RAY_USAGE_STATS_ENABLED=0 PYTHONDONTWRITEBYTECODE=1
C
cd "$home"
/usr/sbin/sshd -D -e -f "$etc/sshd_config" &
touch "/run/ready"
while :; do wait -n 2>/dev/null || sleep 0.2; done  # reap whatever is orphaned to us
