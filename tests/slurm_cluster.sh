#!/usr/bin/env bash
# slurm_cluster.sh - a real Slurm cluster of several nodes on one machine, for tests.
#
# Every node is its own "host": a network, PID, UTS, IPC and mount namespace with its own IP address, hostname,
# process list and /dev/shm, on one bridge. So a test can unplug a node (cut), plug it in again (heal), or pull
# its power (kill). The controller (slurmctld, and slurmdbd + mariadbd for sacct) is such a host too: "ctl".
# The machine itself is the login node: sbatch, srun, salloc, sacct ... work in it once `eval "$(slurm_cluster.sh env)"`.
#
# Commands
#   install            apt-get install what is needed (Debian/Ubuntu)
#   up [NODES]         start a cluster of NODES (default 4) nodes n1, n2, ...; does nothing if it is up already
#   down               stop it and remove everything but the logs
#   restart [NODES]    down, then up
#   status             what lives, what is cut, sinfo
#   env                shell lines to eval: export SLURM_CONF=...
#   cut NODE           unplug the node's network (packets vanish silently); its processes live on
#   heal NODE          plug it in again, boot it if it was killed, restart dead daemons, wait until Slurm has it back
#   kill NODE          power loss: every process of the node dies at once and its network goes silent
#   kill-daemon NODE   kill -9 only the slurmd (for ctl: slurmctld); the job steps live on
#   exec NODE CMD...   run a command inside a node
#   pids NODE          pids (as seen from here) of the node's processes
#   logs [N]           the last N (20) lines of every log
# NODE may be "ctl", the controller, for cut, heal, kill, kill-daemon, exec, pids.
#
# Settings (environment)
#   SLURM_LOCAL_DIR        work dir (default /tmp/slurm-local); at most 60 characters (Unix socket paths)
#   SLURM_LOCAL_GPUS       fake GPUs per node (8)            SLURM_LOCAL_CPUS  fake CPUs per node (16)
#   SLURM_LOCAL_MEM        fake memory per node in MB (64000)
#   SLURM_LOCAL_DB         auto|1|0: slurmdbd + MariaDB, which sacct (and so submitit's job.state) needs (auto: if installed)
#   SLURM_LOCAL_NET        first three octets of the subnet (10.213.X, X from a hash of the work dir)
#   SLURM_LOCAL_CONF_EXTRA a file whose lines are put at the end of slurm.conf
#   SLURM_LOCAL_TIMEOUT    seconds to wait for each thing that starts (60)
# They are read at `up`; other commands only need SLURM_LOCAL_DIR.
#
# Everything that is made outside the work dir (bridge, namespaces, links) is named with a hash of the work dir, so
# clusters in two work dirs do not meet, and `down` never ends a process that was not started by `up` in this work dir.
set -uo pipefail
export LC_ALL=C.UTF-8
PATH=$PATH:/usr/sbin:/sbin

SELF=$(readlink -f "${BASH_SOURCE[0]}")
DIR=${SLURM_LOCAL_DIR:-/tmp/slurm-local}
WAIT=${SLURM_LOCAL_TIMEOUT:-60}
CTL=ctl

die() { echo "slurm_cluster: error: $*" >&2; exit 1; }
say() { echo "slurm_cluster: $*" >&2; }

case $DIR in /*) ;; *) die "SLURM_LOCAL_DIR must be an absolute path: $DIR" ;; esac
DIR=$(readlink -m "$DIR")
case $DIR in *[!A-Za-z0-9/._+-]*) die "SLURM_LOCAL_DIR has a character that Slurm's configuration would trip over: $DIR" ;; esac
[ ${#DIR} -le 60 ] || die "SLURM_LOCAL_DIR is longer than 60 characters (the Unix sockets under it would not fit): $DIR"
[ "$DIR" != / ] && [ "$DIR" != /tmp ] && [ "$DIR" != "${HOME:-/root}" ] || die "SLURM_LOCAL_DIR must be a folder of its own: $DIR"

HASH=$(printf %s "$DIR" | cksum | cut -d' ' -f1)
ID=sl$(printf %04x $((HASH % 65536)))            # bridge sl1a2b, namespaces sl1a2b-n1, links sl1a2b-n1
BR=$ID
export SLURM_CONF=$DIR/etc/slurm.conf

MARK=$DIR/.slurm_cluster                         # made by `up`; without it nothing in the folder is touched
own_dir() {
    [ -e "$MARK" ] && return 0
    [ -z "$(ls -A "$DIR" 2>/dev/null)" ] || die "$DIR holds things that this script did not make; name an empty or new folder in SLURM_LOCAL_DIR"
    mkdir -p "$DIR" && echo "made by slurm_cluster.sh; emptied by its down" >"$MARK" || die "cannot write to $DIR"
}
need_root() { [ "$(id -u)" = 0 ] || die "needs root"; }

# ---- processes: known by pid and start time, so that a pid used anew is never taken for ours ------------------
pstart() { # PID -> its start time; fails if it is gone or a zombie (a PID 1 that does not reap leaves those behind)
    local s
    s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    s=${s##*) }
    # shellcheck disable=SC2086
    set -- $s
    [ "$1" != Z ] && [ "$1" != X ] || return 1
    echo "${20}"
}
record() { local t; t=$(pstart "$2") || return 1; echo "$2 $t" >"$DIR/run/$1.proc"; }
pid_of() { # NAME -> pid, if what was recorded under the name still lives
    local p t now
    read -r p t 2>/dev/null <"$DIR/run/$1.proc" || return 1
    now=$(pstart "$p") || return 1
    [ "$now" = "$t" ] || return 1
    echo "$p"
}
host_alive() { pid_of "host-$1" >/dev/null; }
init_pid() { # NODE -> pid, seen from here, of the node's init (PID 1 of its namespace)
    local p
    p=$(pid_of "host-$1") || return 1
    cat "/proc/$p/task/$p/children" 2>/dev/null | tr -d ' ' | grep . || ps -o pid= --ppid "$p" | tr -d ' ' | grep .
}
wait_for() { # SECONDS COMMAND...: until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

# ---- network --------------------------------------------------------------------------------------------------
ns() { echo "$ID-$1"; }
link_up() { # NODE: make its namespace and its cable, from scratch
    local n=$1 ip=$2
    ip netns add "$(ns "$n")" || return 1
    ip link add "$ID-$n" type veth peer name eth0 netns "$(ns "$n")" || return 1
    ip -n "$(ns "$n")" link set lo up || return 1
    ip -n "$(ns "$n")" addr add "$ip/24" dev eth0 || return 1
    ip -n "$(ns "$n")" link set eth0 up || return 1
    ip -n "$(ns "$n")" route add default via "$NET.1" 2>/dev/null
    ip link set "$ID-$n" master "$BR" up || return 1
}
# Unplugging is leaving the bridge: the node keeps its carrier and its packets vanish. (Not by the bridge port's state:
# kernels take "state 0" with rc 0 and put the port back to forwarding at once.) ARP off, since otherwise this machine
# would answer the node's ARP on the loose cable.
unplug() { ip link set dev "$ID-$1" nomaster && ip link set dev "$ID-$1" arp off && ! plugged "$1"; }
plug() { plugged "$1" || { ip link set dev "$ID-$1" arp on && ip link set dev "$ID-$1" master "$BR" up; }; }
plugged() { [ -e "/sys/class/net/$ID-$1/master" ]; }
node_ip() { if [ "$1" = $CTL ]; then echo "$NET.2"; else echo "$NET.$((10 + ${1#n}))"; fi; }

# ---- state ----------------------------------------------------------------------------------------------------
load() { # the settings that `up` wrote
    [ -r "$DIR/run/settings" ] || return 1
    # shellcheck disable=SC1091
    . "$DIR/run/settings"
    HOSTS=$CTL
    local i
    for ((i = 1; i <= NODES; i++)); do HOSTS="$HOSTS n$i"; done
}
need_up() { load || die "no cluster in $DIR (SLURM_LOCAL_DIR); start one with: $0 up"; }
need_node() {
    [ -n "${1:-}" ] || die "which node? (of: $HOSTS)"
    case " $HOSTS " in *" $1 "*) ;; *) die "no node '$1' (of: $HOSTS)" ;; esac
}

# ---- inside a node: its PID 1 ---------------------------------------------------------------------------------
node_init() {
    local n=$1 boot=${2:-}
    cd / || exit 1
    hostname "$n" || exit 1
    mount --bind "$DIR/etc/hosts" /etc/hosts || exit 1
    mount --bind "$DIR/etc" /etc/slurm || exit 1       # so that also a job without SLURM_CONF finds the cluster
    mount -t tmpfs -o mode=1777 shm /dev/shm || exit 1
    mount -t tmpfs cg "$DIR/cg" || exit 1               # slurmd wants a "cgroup" mount even if it is to use none
    export SLURM_CONF=$DIR/etc/slurm.conf
    start_daemons "$n" "$boot" || echo "$n: a daemon did not start"
    while :; do sleep 1000 & wait $!; done              # bash, as PID 1, reaps what is left to it
}
start_daemons() { # inside node N: every daemon that it lacks
    local n=$1 boot=${2:-}
    if [ "$n" != $CTL ]; then
        mkdir -p "$DIR/spool/$n"
        pgrep -x slurmd >/dev/null || slurmd ${boot:+-b} || return 1
        return 0
    fi
    if [ "$DB" = 1 ]; then
        export MYSQL_UNIX_PORT=$DIR/run/mariadb.sock    # libmariadb looks for the server there
        if ! pgrep -x mariadbd >/dev/null; then
            rm -f "$MYSQL_UNIX_PORT"
            mariadbd --no-defaults --user=root --datadir="$DIR/db" --socket="$MYSQL_UNIX_PORT" --skip-networking \
                --pid-file="$DIR/run/mariadb.pid" --log-error="$DIR/log/mariadb.log" --performance-schema=OFF \
                --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 \
                --innodb-lock-wait-timeout=900 --skip-log-bin &
            wait_for "$WAIT" mariadb-admin --no-defaults -uroot ping >/dev/null 2>&1 || { echo "mariadbd does not answer"; return 1; }
        fi
        if ! pgrep -x slurmdbd >/dev/null; then
            slurmdbd || return 1
            wait_for "$WAIT" cluster_known || { echo "slurmdbd does not answer"; return 1; }
        fi
    fi
    pgrep -x slurmctld >/dev/null || slurmctld || return 1
}

cluster_known() { # "add" of a cluster that is there already fails, so look first
    sacctmgr -n -P show cluster format=cluster 2>/dev/null | grep -qx local || sacctmgr -i -Q add cluster local >/dev/null 2>&1
}
boot_host() { # NODE [-b]: start its PID 1
    local n=$1 boot=${2:-}
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
        SLURM_LOCAL_DIR="$DIR" SLURM_LOCAL_TIMEOUT="$WAIT" \
        setsid nsenter --net="/run/netns/$(ns "$n")" unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc \
        bash "$SELF" __init "$n" "$boot" </dev/null >>"$DIR/log/init-$n.log" 2>&1 9>&- &
    record "host-$n" $! || die "node $n did not start; see $DIR/log/init-$n.log"
}
ns_empty() { [ -z "$(ip netns pids "$(ns "$1")" 2>/dev/null)" ]; }
power_off() { # NODE: SIGKILL to the parent of its PID 1, which takes the PID 1 and so the whole PID namespace along
    local p i
    if p=$(pid_of "host-$1"); then
        i=$(init_pid "$1") && kill -9 "$i" 2>/dev/null
        kill -9 "$p" 2>/dev/null
    fi
    wait_for 10 ns_empty "$1"
}
daemons_in() { # NODE: start what it lacks, in a clean environment
    in_node "$1" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
        SLURM_LOCAL_DIR="$DIR" SLURM_LOCAL_TIMEOUT="$WAIT" bash "$SELF" __daemons "$1" </dev/null >>"$DIR/log/init-$1.log" 2>&1 9>&-
}
in_node() { # NODE CMD...
    local i n=$1
    shift
    i=$(init_pid "$n") || die "node $n is off"
    nsenter -t "$i" -m -u -i -n -p -- "$@"
}

# ---- configuration --------------------------------------------------------------------------------------------
write_conf() {
    local g="" gres="" gtypes="" i
    mkdir -p "$DIR"/{etc,run,log,state,spool,dev,cg,munge} || die "cannot make $DIR"
    chmod 755 "$DIR" "$DIR"/{etc,run,log,state,spool,dev}
    chmod 700 "$DIR/munge"
    if [ "$GPUS" -gt 0 ]; then
        for ((i = 0; i < GPUS; i++)); do mknod "$DIR/dev/gpu$i" c 1 3 2>/dev/null || : >"$DIR/dev/gpu$i"; done   # as /dev/null
        g="gpu$([ "$GPUS" -gt 1 ] && echo "[0-$((GPUS - 1))]" || echo 0)"
        gres="Gres=gpu:$GPUS"
        gtypes="GresTypes=gpu"
        echo "Name=gpu File=$DIR/dev/$g" >"$DIR/etc/gres.conf"
    else
        : >"$DIR/etc/gres.conf"
    fi
    printf '%s\n' CgroupPlugin=cgroup/v1 "CgroupMountpoint=$DIR/cg" >"$DIR/etc/cgroup.conf"
    {
        echo "127.0.0.1 localhost"
        echo "$NET.1 $(hostname)"
        echo "$NET.2 $CTL"
        for ((i = 1; i <= NODES; i++)); do echo "$NET.$((10 + i)) n$i"; done
    } >"$DIR/etc/hosts"
    {
        cat <<CONF
ClusterName=local
SlurmctldHost=$CTL($NET.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire (at least 5) is also how long a requeued job waits before it starts again (120 s unless set)
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups, no CPU binding: the CPUs, memory and GPUs are fiction
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
$gtypes
# quick reactions
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=10
UnkillableStepTimeout=30
BatchStartTimeout=10
MinJobAge=3600
CompleteWait=0
InactiveLimit=0
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,bf_max_job_test=500,default_queue_depth=500,kill_invalid_depend
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a job that is preempted gets the signal of its --signal at once, as near its time limit
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# srun looks for the command on the machine where it runs, and refuses one that is not there
LaunchParameters=test_exec
MaxArraySize=10001
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.log
CONF
        if [ "$DB" = 1 ]; then
            echo "AccountingStorageType=accounting_storage/slurmdbd"
            echo "AccountingStorageHost=$NET.2"
            echo "AccountingStoragePass=socket=$DIR/run/munge.sock"     # AuthInfo is not used for slurmdbd
            [ "$GPUS" -gt 0 ] && echo "AccountingStorageTRES=gres/gpu"
        else
            echo "AccountingStorageType=accounting_storage/none"
        fi
        for ((i = 1; i <= NODES; i++)); do
            echo "NodeName=n$i NodeAddr=$NET.$((10 + i)) CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN"
        done
        echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO"
        # jobs of this one preempt those of the other
        echo "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO"
        # jobs of this one have time between the notice and the end
        echo "PartitionName=graceful Nodes=ALL GraceTime=120 MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO"
        [ -z "$EXTRA" ] || cat "$EXTRA"
    } >"$DIR/etc/slurm.conf"
    if [ "$DB" = 1 ]; then
        cat >"$DIR/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
DbdHost=$CTL
DbdAddr=$NET.2
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.pid
MessageTimeout=5
CommitDelay=0
CONF
        chmod 600 "$DIR/etc/slurmdbd.conf"
    fi
}

start_munged() {
    pid_of munged >/dev/null && return 0
    [ -s "$DIR/munge/key" ] || (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")
    rm -f "$DIR/run/munge.sock"*
    # no list and no subshell in the background: $! is to be munged itself, and nothing may hold the lock (9) open
    # In a network namespace of ours (its socket is a file, so that is no hindrance): `down` finds it there by name even
    # when the work dir and its records are gone.
    [ -e "/run/netns/$ID-munge" ] || ip netns add "$ID-munge" || die "cannot make a network namespace"
    setsid nsenter --net="/run/netns/$ID-munge" munged --foreground --socket="$DIR/run/munge.sock" --key-file="$DIR/munge/key" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" --num-threads=10 </dev/null >>"$DIR/log/munged.log" 2>&1 9>&- &
    record munged $! || die "munged did not start: $(tail -n 3 "$DIR/log/munged.log")"
    wait_for 10 munge_answers || die "munged does not answer: $(tail -n 3 "$DIR/log/munged.log")"
}
munge_answers() { munge --socket="$DIR/run/munge.sock" -n >/dev/null 2>&1; }

ctl_answers() { scontrol ping 2>/dev/null | grep -q 'is UP'; }
nodes_idle() { [ "$(sinfo -h -N -p debug -o '%N %T' 2>/dev/null | grep -cE ' (idle|mixed|allocated|completing)$')" = "$NODES" ]; }
resume() { scontrol update nodename="$1" state=resume >/dev/null 2>&1; }
node_ready() { sinfo -h -N -n "$1" -o '%T' 2>/dev/null | grep -qE '^(idle|mixed|allocated|completing)$'; }
fail_up() {
    echo "slurm_cluster: error: $*" >&2
    sinfo -N -l >&2 2>&1
    logs 8 >&2
    exit 1
}
logs() { local f; for f in "$DIR"/log/*.log; do echo "== $f"; grep -viE 'pmi|MPI: Cannot' "$f" | tail -n "${1:-20}"; done; }

# ---- commands -------------------------------------------------------------------------------------------------
cmd_install() {
    need_root
    local want="munge slurm-wlm slurm-client slurmdbd mariadb-server iproute2 procps util-linux hostname" p missing=""
    for p in $want; do dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"; done
    [ -n "$missing" ] || { say "everything is installed already"; return 0; }
    say "installing with apt-get:$missing"
    apt-get update -qq || say "warning: apt-get update failed; going on with the lists that are there"
    # policy-rc.d 101: apt must not start any of these as a service of this machine
    local policy=/usr/sbin/policy-rc.d made=0 rc
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=1; }
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null </dev/null
    rc=$?
    [ $made = 0 ] || rm -f $policy
    [ $rc = 0 ] || die "apt-get install$missing failed"
}

cmd_up() {
    need_root
    local want=${1:-} c n t0=$SECONDS
    case $want in '') ;; *[!0-9]*) die "up: not a number of nodes: $want" ;; esac
    for c in munged munge slurmctld slurmd sbatch ip unshare nsenter pgrep hostname cksum flock; do
        command -v $c >/dev/null || die "$c is not installed; run: $0 install"
    done
    if load && host_alive $CTL; then
        [ -z "$want" ] || [ "$want" = "$NODES" ] || die "a cluster of $NODES nodes is up in $DIR; run: $0 restart $want"
        start_munged
        for n in $HOSTS; do host_alive "$n" && plugged "$n" && daemons_in "$n" || cmd_heal "$n" quiet; done
    else
        clean
        NODES=${want:-4}
        [ "$NODES" -ge 1 ] && [ "$NODES" -le 200 ] || die "up: 1 to 200 nodes, not $NODES"
        NET=${SLURM_LOCAL_NET:-10.213.$((HASH / 65536 % 254 + 1))}
        GPUS=${SLURM_LOCAL_GPUS:-8} CPUS=${SLURM_LOCAL_CPUS:-16} MEM=${SLURM_LOCAL_MEM:-64000}
        EXTRA=${SLURM_LOCAL_CONF_EXTRA:-}
        [ -z "$EXTRA" ] || [ -r "$EXTRA" ] || die "SLURM_LOCAL_CONF_EXTRA: cannot read $EXTRA"
        DB=${SLURM_LOCAL_DB:-auto}
        if [ "$DB" = auto ]; then
            DB=0
            command -v slurmdbd >/dev/null && command -v mariadbd >/dev/null && DB=1
        fi
        [ "$DB" = 0 ] || { command -v slurmdbd && command -v mariadbd && command -v mariadb-install-db; } >/dev/null ||
            die "SLURM_LOCAL_DB=1, but slurmdbd or MariaDB is not installed; run: $0 install"
        [ -z "$(ip -o -4 addr show to "$NET.0/24")" ] || die "$NET.0/24 is in use on this machine already; set SLURM_LOCAL_NET"
        mkdir -p /etc/slurm
        write_conf
        printf '%s\n' "NODES=$NODES" "NET=$NET" "DB=$DB" >"$DIR/run/settings"
        load
        # an address of its own: by default a bridge has that of a port, and would change it when that port leaves
        ip link add "$BR" address "$(printf '02:5c:%02x:%02x:%02x:%02x' $((HASH >> 24 & 255)) $((HASH >> 16 & 255)) $((HASH >> 8 & 255)) $((HASH & 255)))" type bridge || die "cannot make a bridge (needs CAP_NET_ADMIN)"
        ip link set "$BR" up && ip addr add "$NET.1/24" dev "$BR" || die "cannot set the bridge $BR up"
        start_munged
        if [ "$DB" = 1 ] && [ ! -d "$DIR/db/mysql" ]; then
            mariadb-install-db --no-defaults --user=root --datadir="$DIR/db" --auth-root-authentication-method=normal \
                --skip-test-db >"$DIR/log/mariadb-install.log" 2>&1 || fail_up "mariadb-install-db failed"
        fi
        for n in $HOSTS; do
            link_up "$n" "$(node_ip "$n")" || die "cannot make the network of node $n"
            boot_host "$n"
        done
    fi
    wait_for "$WAIT" ctl_answers || fail_up "slurmctld does not answer"
    # a node that Slurm or an admin took out (drain, down) is to be usable after `up`, too
    wait_for 5 nodes_idle || for n in $(sinfo -h -N -o '%N %T' | sed -nE 's/^(\S+) (drain|down).*/\1/p'); do resume "$n"; done
    wait_for "$WAIT" nodes_idle || fail_up "not all nodes came up within $WAIT s"
    say "up: $NODES nodes in $((SECONDS - t0)) s; now: eval \"\$(SLURM_LOCAL_DIR=$DIR $0 env)\""
}

clean() { # everything that an `up` in this work dir made, whether or not it ended well
    local n l i p
    if load; then
        for n in $HOSTS; do power_off "$n" || say "warning: processes of node $n are still there"; done
        if p=$(pid_of munged); then
            kill "$p"
            i=0
            while pid_of munged >/dev/null && [ $i -lt 60 ]; do sleep 0.05; i=$((i + 1)); done
            ! pid_of munged >/dev/null || kill -9 "$p"
        fi
    fi
    # leftovers whose records are gone: namespaces and links that carry this work dir's hash are ours, and so is what runs in them
    for n in $(ip netns list 2>/dev/null | cut -d' ' -f1 | grep "^$ID-"); do
        for p in $(ip netns pids "$n"); do kill -9 "$p" 2>/dev/null; done
        ip netns del "$n"
    done
    for l in $(ls /sys/class/net | grep "^$ID-"); do ip link del "$l" 2>/dev/null; done
    [ ! -e "/sys/class/net/$BR" ] || ip link del "$BR"
    [ ! -e "$MARK" ] || rm -rf "$DIR"/{etc,run,state,spool,dev,cg,munge,db,log}
}
cmd_down() {
    need_root
    local keep=""
    if [ -e "$MARK" ] && [ -d "$DIR/log" ]; then keep=$(mktemp -d "$DIR/.log.XXXXXX") && cp -a "$DIR/log/." "$keep/"; fi
    clean
    if [ -n "$keep" ]; then
        rm -rf "$DIR/log"
        mv "$keep" "$DIR/log"
    fi
    say "down"
}

cmd_status() {
    need_up
    local n i s
    echo "dir $DIR  net $NET.0/24  bridge $BR  sacct $([ "$DB" = 1 ] && echo yes || echo no)"
    echo "munged: $(pid_of munged || echo dead)"
    for n in $HOSTS; do
        if i=$(init_pid "$n"); then
            s="init $i, daemons:$(in_node "$n" ps -e -o comm= | grep -E '^(slurm(d|ctld|dbd)|mariadbd)$' | sort | tr '\n' ' ' | sed 's/^/ /; s/ $//')"
        else
            s="off"
        fi
        echo "$n $(node_ip "$n"): $s; network $(plugged "$n" && echo on || echo cut)"
    done
    host_alive $CTL && plugged $CTL && sinfo -N -l
    for n in $HOSTS; do host_alive "$n" || return 1; done
}

cmd_cut() { need_root; need_up; need_node "${1:-}"; unplug "$1" || die "cannot cut $1"; }
cmd_heal() {
    need_root; need_up; need_node "${1:-}"
    local n=$1
    plug "$n" || die "cannot plug $n in"
    if host_alive "$n"; then
        daemons_in "$n" || die "a daemon of $n does not start"
        # have slurmd register at once; left to itself Slurm asks a lost node again only after 5-15 s
        [ "$n" = $CTL ] || in_node "$n" pkill -HUP -x slurmd
    else
        boot_host "$n" -b
    fi
    if [ "$n" = $CTL ]; then
        wait_for "$WAIT" ctl_answers || die "slurmctld does not answer"
    elif [ "${2:-}" != quiet ]; then
        # Slurm asks a node that it lost again only now and then (SlurmdTimeout/3); a node that an admin or a
        # failed prolog took out (down, drain) stays out until it is resumed
        node_ready "$n" || sinfo -h -N -n "$n" -o %T | grep -qE '^(down|drain)[a-z]*$' && resume "$n"
        wait_for 15 node_ready "$n" || scontrol update nodename="$n" state=resume >/dev/null 2>&1
        wait_for "$WAIT" node_ready "$n" || die "Slurm does not have $n back: $(sinfo -h -N -n "$n" -o '%N %T %E')"
    fi
}
cmd_kill() { need_root; need_up; need_node "${1:-}"; unplug "$1" || die "cannot cut $1"; power_off "$1" || die "processes of $1 are still there"; rm -f "$DIR/run/host-$1.proc"; }
cmd_kill_daemon() {
    need_root; need_up; need_node "${1:-}"
    local d=slurmd
    [ "$1" != $CTL ] || d=slurmctld
    in_node "$1" pkill -9 -x $d || die "no $d in $1"       # pkill in the node's PID namespace sees only that node
}

lock() { own_dir && exec 9>"$DIR/.lock" && flock -w 90 9 || die "another slurm_cluster.sh is at work in $DIR"; }

cmd=${1:-}
[ $# -eq 0 ] || shift
case $cmd in
install) cmd_install ;;
up) need_root; lock; cmd_up "$@" ;;
down) need_root; [ ! -e "$MARK" ] || lock; cmd_down ;;
restart) need_root; lock; cmd_down; cmd_up "$@" ;;
status) need_root; cmd_status ;;
env) echo "export SLURM_CONF=$DIR/etc/slurm.conf" ;;
cut) cmd_cut "$@" ;;
heal) need_root; lock; cmd_heal "$@" ;;
kill) need_root; lock; cmd_kill "$@" ;;
kill-daemon) cmd_kill_daemon "$@" ;;
exec) need_root; need_up; need_node "${1:-}"; in_node "$@" ;;
pids) need_root; need_up; need_node "${1:-}"; ip netns pids "$(ns "$1")" ;;
logs) logs "$@" ;;
__init) load || exit 1; node_init "$@" ;;
__daemons) load || exit 1; start_daemons "$@" ;;
*) sed -n '2,/^set -uo/p' "$SELF" | sed '$d; s/^# \{0,1\}//' >&2; exit 2 ;;
esac
