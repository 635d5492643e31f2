//! Forwards a local port through the API server to the client port of a member.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use tokio::io::copy_bidirectional;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::access::Access;
use crate::error::Result;

/// A forwarded local port. Dropping the value closes the port.
pub(super) struct Forward {
    /// The local port on 127.0.0.1.
    pub(super) port: u16,
    task: JoinHandle<()>,
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens on a free local port, and forwards each connection to the port `to` of the pod.
pub(super) async fn forward(access: &Access, pod: &Pod, to: u16) -> Result<Forward> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let port = listener.local_addr()?.port();
    let api: Api<Pod> = access.api();
    let name = pod.name_any();
    let task = tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let (api, name) = (api.clone(), name.clone());
            tokio::spawn(async move {
                let Ok(mut forwarder) = api.portforward(&name, &[to]).await.inspect_err(|error| {
                    eprintln!("port-forward to pod {name}: {error}");
                }) else {
                    return;
                };
                if let Some(mut stream) = forwarder.take_stream(to) {
                    // An error is ignored, because etcdctl closes its connections abruptly.
                    let _ = copy_bidirectional(&mut connection, &mut stream).await;
                }
            });
        }
    });
    Ok(Forward { port, task })
}
