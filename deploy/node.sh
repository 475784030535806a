#!/usr/bin/env bash
# The Ray node of a KubeRay worker and, beside it, an engine:  raykv-node COMMAND [ARGUMENT ...]
#
# An engine that ends is started again; the Ray node, and with it the pool, stays meanwhile. Ray that
# ends is started again too, and the engine goes on at the new node; a Ray node that stays away fails
# the liveness probe, and Kubernetes starts the container anew. At SIGTERM the engine is ended first.
#
# KUBERAY_GEN_RAY_START_CMD: how to start Ray in the foreground; set by KubeRay.
# NODE_HEALTH_URL: answers with 200 when the Ray node is up.

set -u
health_url=${NODE_HEALTH_URL:-http://127.0.0.1:52365/api/healthz}
: "${KUBERAY_GEN_RAY_START_CMD:?set by KubeRay in the container of a worker}"
: "${1:?raykv-node needs the command of an engine}"

longest_pause_s=60 # between two starts of what does not live
good_run_s=300     # what ends after so long is started at once again

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
start_ray() {
    bash -c "exec $KUBERAY_GEN_RAY_START_CMD" &
    ray=$!
    ray_started=$SECONDS
}
start_ray

# The startup probe limits how long this may take.
until [ "$stopping" ] || curl --silent --fail --max-time 2 --output /dev/null "$health_url"; do
    sleep 1 &
    wait -n -p ended "$ray" "$!"
    [ "${ended:-}" = "$ray" ] && { say "Ray ended before its node was up"; exit 1; }
done

# How long to wait before what has run so long, and waited so long before, is started again.
next_pause() {
    local pause_s=$((2 * $2 < longest_pause_s ? 2 * $2 : longest_pause_s))
    [ "$1" -ge $good_run_s ] && pause_s=1
    echo $((pause_s > 0 ? pause_s : 1))
}

ray_pause_s=0
ray_due=0
engine_pause_s=0
engine_due=0
while [ ! "$stopping" ]; do
    [ "$ray" ] || [ $SECONDS -lt $ray_due ] || start_ray
    if [ ! "$engine" ] && [ $SECONDS -ge $engine_due ]; then
        "$@" &
        engine=$!
        engine_started=$SECONDS
    fi
    tick=
    if [ ! "$ray" ] || [ ! "$engine" ]; then
        sleep 1 &
        tick=$!
    fi
    ended=
    wait -n -p ended $ray $engine $tick
    status=$?
    [ "${ended:=}" ] || continue
    if [ "$ended" = "$ray" ]; then
        ray=
        ray_pause_s=$(next_pause $((SECONDS - ray_started)) $ray_pause_s)
        ray_due=$((SECONDS + ray_pause_s))
        say "Ray ended with status $status; starting it again in $ray_pause_s s"
    elif [ "$ended" = "$engine" ]; then
        engine=
        engine_pause_s=$(next_pause $((SECONDS - engine_started)) $engine_pause_s)
        engine_due=$((SECONDS + engine_pause_s))
        say "the engine ended with status $status; starting it again in $engine_pause_s s"
    fi
done

[ "$engine" ] && end "$engine"
[ "$ray" ] && end "$ray"
exit 0
