//! The read-only admin server: `/healthz`, `/readyz` and `/metrics`.
//!
//! A standby is Ready, because it can take over the lease. If the process cannot take over, `/readyz` fails and its
//! body names the missing condition.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tracing::debug;

/// The content type of the OpenMetrics text format.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The admin server cannot start or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is in use or does not belong to this host.
    #[error("cannot listen on {address}: choose another --listen-addr")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The server stopped without a shutdown.
    #[error("the admin server stopped unexpectedly")]
    Serve(#[source] std::io::Error),
}

/// The condition that keeps the process from leading. The waiting code sets it and `/readyz` reports it.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<Waiting>>);

#[derive(Default)]
enum Waiting {
    #[default]
    Starting,
    For(String),
    Nothing,
}

impl Readiness {
    /// Reports not ready. `what` completes the text "waiting for".
    pub fn waiting_for(&self, what: &str) {
        self.set(Waiting::For(what.to_owned()));
    }

    /// Reports ready: the process leads or can take over.
    pub fn ready(&self) {
        self.set(Waiting::Nothing);
    }

    fn set(&self, waiting: Waiting) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    fn answer(&self) -> (StatusCode, String) {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Waiting::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting\n".to_owned()),
            Waiting::For(what) => (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("waiting for {what}\n"),
            ),
            Waiting::Nothing => (StatusCode::OK, "ok\n".to_owned()),
        }
    }
}

/// State that the routes read.
#[derive(Clone)]
pub struct Admin {
    /// Readiness of the process to lead.
    pub readiness: Readiness,
    /// The metrics of the process.
    pub registry: Arc<Registry>,
}

/// Listens on `address`. As in Go's servers, `0.0.0.0` means all addresses of both IP families: the kubelet of an IPv6
/// cluster probes the IPv6 address of a pod.
///
/// # Errors
/// If the address cannot be bound. The process then ends, because only the user can choose another address.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    if address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED) {
        let both = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port());
        match TcpListener::bind(both).await {
            Ok(listener) => return Ok(listener),
            Err(error) => debug!(%error, "IPv6 is not available: listening on IPv4 only"),
        }
    }
    TcpListener::bind(address)
        .await
        .map_err(|source| Error::Bind { address, source })
}

/// Serves until the process ends.
///
/// # Errors
/// If the server stops by itself.
pub async fn serve(listener: TcpListener, admin: Admin) -> Result<(), Error> {
    axum::serve(listener, routes(admin))
        .await
        .map_err(Error::Serve)
}

fn routes(admin: Admin) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(admin)
}

async fn readyz(State(admin): State<Admin>) -> (StatusCode, String) {
    admin.readiness.answer()
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let mut body = String::new();
    if let Err(error) = encode(&mut body, &admin.registry) {
        body.clear();
        let _ = writeln!(body, "metrics cannot be encoded: {error}");
        return (StatusCode::INTERNAL_SERVER_ERROR, body).into_response();
    }
    ([(header::CONTENT_TYPE, OPEN_METRICS)], body).into_response()
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn served(admin: Admin) -> SocketAddr {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, admin));
        address
    }

    #[tokio::test]
    async fn readyz_names_missing_condition_until_ready() {
        let readiness = Readiness::default();
        let address = served(Admin {
            readiness: readiness.clone(),
            registry: Arc::default(),
        })
        .await;
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 503"));
        readiness.waiting_for("the CRD etcdclusters");
        assert!(
            get(address, "/readyz")
                .await
                .contains("waiting for the CRD etcdclusters")
        );
        readiness.ready();
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn metrics_are_served_as_open_metrics() {
        let mut registry = Registry::default();
        let counter = Counter::<u64>::default();
        registry.register("seen", "How often", counter.clone());
        counter.inc();
        let address = served(Admin {
            readiness: Readiness::default(),
            registry: Arc::new(registry),
        })
        .await;
        let answer = get(address, "/metrics").await;
        assert!(answer.contains("application/openmetrics-text"), "{answer}");
        assert!(answer.contains("seen_total 1"), "{answer}");
        assert!(answer.trim_end().ends_with("# EOF"), "{answer}");
    }

    #[tokio::test]
    async fn unspecified_address_listens_on_both_ip_families() {
        let listener = bind("0.0.0.0:0".parse().unwrap()).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(serve(
            listener,
            Admin {
                readiness: Readiness::default(),
                registry: Arc::default(),
            },
        ));
        for host in ["127.0.0.1", "[::1]"] {
            let address = format!("{host}:{port}").parse().unwrap();
            assert!(
                get(address, "/healthz").await.starts_with("HTTP/1.1 200"),
                "{host}"
            );
        }
    }

    #[tokio::test]
    async fn port_in_use_is_reported_with_remedy() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let error = bind(listener.local_addr().unwrap()).await.unwrap_err();
        assert!(error.to_string().contains("--listen-addr"));
    }
}
