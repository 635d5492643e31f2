#!/bin/sh
# Writes the Go module of one Kubernetes version: `pin-kubernetes.sh 1.33.13` writes kubernetes-1.33.
# Run it again with a newer patch release, and commit the module.
#
# Kubernetes requires its own libraries as v0.0.0 and replaces them by folders of its repository. Another module
# does not inherit these replacements, so they are written again, with the published version of each library.
set -eu
version=$1
minor=${version%.*}
cd "$(dirname "$0")"
folder=kubernetes-$minor
published=$(go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
mkdir -p "$folder"
ln -sf ../kube/main.go "$folder/main.go"
{
    echo 'module testbed/kube'
    echo
    grep '^go ' "$published"
    echo
    echo "require k8s.io/kubernetes v$version"
    echo
    echo 'replace ('
    sed -n "s|^\(.*\) => \./staging/src/\(.*\)$|\1 => \2 v0.${version#*.}|p" "$published"
    echo ')'
} >"$folder/go.mod"
cd "$folder"
rm -f go.sum
GOFLAGS=-mod=mod go mod tidy
