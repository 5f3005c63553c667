# Sourced by the scripts that install Debian packages; they have a function `say`, and `root` is their way to be it, () or (sudo).
#
# apt_get LOG COMMAND...: runs COMMAND, which ends in a call of apt-get; its output is LOG. While another program holds one of
# apt's locks it waits, APT_WAIT_S seconds at most. (DPkg::Lock::Timeout is for the lock of dpkg alone: those of the package lists
# and of the downloads are refused at once all the same.)
apt_get() {
  local log=$1 limit=${APT_WAIT_S:-600} since='' holder
  shift
  until ${root[@]+"${root[@]}"} env LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1; do
    holder=$(grep -m 1 -E 'Could not get lock|(is|was) locked by another process' "$log") || return 1
    if [ -z "$since" ]; then
      since=$SECONDS
      say "another program is installing packages: waiting for it, $limit s at most (APT_WAIT_S). ${holder#E: }"
    elif [ $((SECONDS - since)) -ge "$limit" ]; then
      say "the lock was not free within $limit s"
      return 1
    fi
    sleep 2
  done
  [ -z "$since" ] || say "the lock is free after $((SECONDS - since)) s"
}
