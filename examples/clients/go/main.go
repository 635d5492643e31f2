// Writes and reads a key with a client certificate. docs/connecting.md explains this program.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func main() {
	endpoint := os.Getenv("ETCD_ENDPOINT") // https://main-client.NAMESPACE.svc:2379
	directory := os.Getenv("ETCD_TLS")     // the directory with the mounted Secret: /etcd-tls
	files := transport.TLSInfo{
		CertFile:      filepath.Join(directory, "tls.crt"),
		KeyFile:       filepath.Join(directory, "tls.key"),
		TrustedCAFile: filepath.Join(directory, "ca.crt"),
	}
	tls, err := files.ClientConfig()
	if err != nil {
		log.Fatal(err)
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            []string{endpoint},
		TLS:                  tls, // without TLS: leave out this field and use http://
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		// With authentication: Username and Password.
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := client.Put(ctx, "hello", "world"); err != nil {
		log.Fatal(err)
	}
	got, err := client.Get(ctx, "hello")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(got.Kvs[0].Value), got.Header.Revision)
}
