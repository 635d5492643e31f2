// Program coredns contains only the plugins in the Corefiles of the testbed.
package main

import (
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
	_ "github.com/coredns/coredns/plugin/template"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

// The plugins receive a query in the order of plugin.cfg in CoreDNS. Only template
// comes last, because it answers the queries that no other plugin has answered.
func init() {
	dnsserver.Directives = []string{
		"reload", "bind", "ready", "prometheus", "errors", "log", "cache", "loadbalance", "kubernetes", "template",
	}
}

func main() { coremain.Run() }
