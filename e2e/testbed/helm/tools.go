//go:build tools

// Package helm pins Helm.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
