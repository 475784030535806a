#!/usr/bin/env bash
# The Ray node of a KubeRay worker and, beside it, an engine:  raykv-node COMMAND [ARGUMENT ...]
#
# An engine that ends is started again; the Ray node, and with it the pool, stays meanwhile. When
# Ray ends, or at SIGTERM, the engine is ended first, then this script. Kubernetes starts the
# container anew.
#
# KUBERAY_GEN_RAY_START_CMD: how to start Ray in the foreground; set by KubeRay.
# NODE_HEALTH_URL: answers with 200 when the Ray node is up.

set -u
health_url=${NODE_HEALTH_URL:-http://127.0.0.1:52365/api/healthz}
: "${KUBERAY_GEN_RAY_START_CMD:?set by KubeRay in the container of a worker}"
: "${1:?raykv-node needs the command of an engine}"

longest_pause_s=60 # between two starts of an engine that does not live
good_run_s=300     # after so long an engine that ends is started at once again

say() { echo "raykv-node: $*" >&2; }

stopping=
ray=
engine=
trap 'stopping=yes' TERM INT

# Ends a process that we have started, with SIGTERM. Kubernetes limits how long that may take.
end() {
    kill -TERM "$1" 2>/dev/null
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
}

ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" # Ray has a connection for every process
bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!

# The startup probe limits how long this may take.
until [ "$stopping" ] || curl --silent --fail --max-time 2 --output /dev/null "$health_url"; do
    sleep 1 &
    wait -n -p ended "$ray" "$!"
    [ "${ended:-}" = "$ray" ] && { say "Ray ended before its node was up"; exit 1; }
done

pause_s=1
ended=
while [ ! "$stopping" ] && [ "$ended" != "$ray" ]; do
    started=$SECONDS
    "$@" &
    engine=$!
    wait -n -p ended "$ray" "$engine"
    status=$?
    [ "${ended:=}" = "$engine" ] || continue
    engine=
    [ $((SECONDS - started)) -ge $good_run_s ] && pause_s=1
    say "the engine ended with status $status; starting it again in $pause_s s"
    sleep $pause_s &
    wait -n -p ended "$ray" "$!"
    pause_s=$((2 * pause_s < longest_pause_s ? 2 * pause_s : longest_pause_s))
    : "${ended:=}"
done

[ "$engine" ] && end "$engine"
if [ "$ended" = "$ray" ]; then
    say "Ray has ended, and with it this node"
    exit 1
fi
end "$ray"
exit 0
