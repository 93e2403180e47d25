# Sourced by the scripts, with $root set: where the Python environment is.
venv=${VENV:-$root/.venv}
case $venv in
    /*) ;;
    *) venv=$PWD/$venv ;;
esac
