// Program kube is every Kubernetes program of the testbed in one file: it
// looks at the name it was called by, so one link of the large common part
// serves six programs.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllerManager,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 kubeletCommand,
}

// volumes is where the controller manager's provisioner makes its folders; the
// path is built into it.
const volumes = "/tmp/hostpath_pv"

// controllerManager opens each new volume to all users: the provisioner makes
// folders that only root can enter, and pods here do not run as root.
func controllerManager() *cobra.Command {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		err = watcher.Add(volumes)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "volumes will be for root alone: %v\n", err)
		return controllers.NewControllerManagerCommand()
	}
	go func() {
		for event := range watcher.Events {
			if !event.Has(fsnotify.Create) {
				continue
			}
			if err := os.Chmod(event.Name, 0o777); err != nil {
				fmt.Fprintf(os.Stderr, "opening volume: %v\n", err)
			}
		}
	}()
	return controllers.NewControllerManagerCommand()
}

// kubeletCommand calls the function of each version: before 1.34, it has no
// argument.
func kubeletCommand() *cobra.Command {
	switch command := any(kubelet.NewKubeletCommand).(type) {
	case func(context.Context) *cobra.Command:
		return command(context.Background())
	case func() *cobra.Command:
		return command()
	}
	panic("the kubelet of this version starts in another way: add it here")
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "kubectl" {
		if cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()) != nil {
			os.Exit(1)
		}
		return
	}
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: call this file by the name of a Kubernetes program\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(program()))
}
