"""Writes and reads a key with a client certificate. docs/connecting.md explains this program."""
import os

import etcd3gw

directory = os.environ["ETCD_TLS"]  # the directory with the mounted Secret: /etcd-tls
client = etcd3gw.client(
    host=os.environ["ETCD_HOST"],  # main-client.NAMESPACE.svc
    port=int(os.environ.get("ETCD_PORT", "2379")),
    protocol="https",  # without TLS: "http", and no files
    ca_cert=os.path.join(directory, "ca.crt"),
    cert_cert=os.path.join(directory, "tls.crt"),
    cert_key=os.path.join(directory, "tls.key"),
    timeout=5,
)
client.put("hello", "world")
value, metadata = client.get("hello", metadata=True)[0]
print(value.decode(), metadata["mod_revision"])
