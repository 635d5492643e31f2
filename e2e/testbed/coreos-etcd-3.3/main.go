// Program etcd is the server as upstream builds it. Upstream calls the module go.etcd.io/etcd or github.com/coreos/etcd.
package main

import "github.com/coreos/etcd/etcdmain"

func main() { etcdmain.Main() }
