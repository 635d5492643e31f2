//go:build tools

package main

import _ "github.com/coreos/etcd/etcdctl"
