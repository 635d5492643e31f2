//go:build tools

// Package krew pins Krew, the manager of plugins of kubectl.
package krew

import _ "sigs.k8s.io/krew/cmd/krew"
