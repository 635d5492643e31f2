//go:build tools

// Package actionlint pins actionlint, the checker of GitHub workflows.
package actionlint

import _ "github.com/rhysd/actionlint/cmd/actionlint"
