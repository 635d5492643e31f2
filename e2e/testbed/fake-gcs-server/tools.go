//go:build tools

// Package fakegcs pins the Google Cloud Storage server of the tests.
package fakegcs

import _ "github.com/fsouza/fake-gcs-server"
