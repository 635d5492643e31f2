//go:build tools

// Package versitygw pins the S3 server.
package versitygw

import _ "github.com/versity/versitygw/cmd/versitygw"
