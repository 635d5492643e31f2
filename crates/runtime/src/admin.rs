//! The read-only admin server: `/healthz`, `/readyz` and `/metrics`.
//!
//! A standby (a replica that is not the leader) is ready, because it can take over the lease. While the process can
//! neither lead nor take over the lease, `/readyz` fails and reports what the process is waiting for.
//!
//! Every pod can connect to the port. The server therefore closes slow and idle connections and limits their number, so
//! that clients take little memory and few file descriptors.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tracing::debug;

use crate::shards::Shards;

/// The content type of the OpenMetrics text format.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Limits for the connections to the port of the admin server.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Time limit for the header of a request, and for an idle connection.
    header: Duration,
    /// Maximum duration of a connection.
    lifetime: Duration,
    /// Maximum number of open connections.
    connections: usize,
    /// Maximum number of open connections from one address. Without this limit, one client could use all connections,
    /// and the kubelet's probes would fail.
    per_address: usize,
}

const LIMITS: Limits = Limits {
    header: Duration::from_secs(10),
    lifetime: Duration::from_mins(1),
    connections: 128,
    per_address: 16,
};

/// Pause after a failed accept, for example because no file descriptor was free.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// Why the admin server did not start, or why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is in use or does not belong to this host.
    #[error("cannot listen on {address}: choose another --listen-addr")]
    Bind {
        /// The address that the operator could not use.
        address: SocketAddr,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The server stopped without a shutdown.
    #[error("the admin server stopped unexpectedly")]
    Serve(#[source] std::io::Error),
}

/// The readiness of the process, which `/readyz` reports. Code that waits, for example for the CRD, sets the text of
/// the response.
#[derive(Clone, Default)]
pub struct Readiness {
    waiting: Arc<Mutex<Waiting>>,
    shards: Arc<OnceLock<Shards>>,
}

#[derive(Default)]
enum Waiting {
    #[default]
    Starting,
    For(String),
    Nothing,
}

impl Readiness {
    /// Marks the process as not ready, so that `/readyz` reports `waiting for {what}`.
    pub fn waiting_for(&self, what: &str) {
        self.set(Waiting::For(what.to_owned()));
    }

    /// Marks the process as ready: the process is the leader, or can take over the lease.
    pub fn ready(&self) {
        self.set(Waiting::Nothing);
    }

    /// Makes `/readyz` name the shards that the process holds. Only the first call has an effect.
    pub fn report_shards(&self, shards: Shards) {
        let _ = self.shards.set(shards);
    }

    fn set(&self, waiting: Waiting) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    fn answer(&self) -> (StatusCode, String) {
        let shards = self.shards.get().and_then(Shards::summary);
        match &*self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            Waiting::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting\n".to_owned()),
            Waiting::For(what) => (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("waiting for {what}\n"),
            ),
            Waiting::Nothing => (
                StatusCode::OK,
                format!("ok\n{}", shards.unwrap_or_default()),
            ),
        }
    }
}

/// The state that the server reports.
#[derive(Clone)]
pub struct Admin {
    /// Whether the process is ready.
    pub readiness: Readiness,
    /// The metrics of the process.
    pub registry: Arc<Registry>,
}

/// Listens on `address`. As in Go's servers, `0.0.0.0` means all IPv4 and IPv6 addresses, because the kubelet of an
/// IPv6 cluster probes a pod at its IPv6 address.
///
/// # Errors
/// Fails if the address cannot be bound. The caller ends the process, because only the user can choose another address.
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
/// Fails if the server stops without a shutdown.
pub async fn serve(listener: TcpListener, admin: Admin) -> Result<(), Error> {
    serve_within(LIMITS, listener, admin).await
}

async fn serve_within(limits: Limits, listener: TcpListener, admin: Admin) -> Result<(), Error> {
    let routes = routes(admin);
    let connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Some(slot) = connections.open(peer.ip().to_canonical(), limits) {
                    tokio::spawn(serve_connection(limits, stream, routes.clone(), slot));
                } else {
                    debug!(%peer, "closed a connection: too many connections are open");
                }
            }
            Err(error) => {
                debug!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn serve_connection(limits: Limits, stream: TcpStream, routes: Router, _slot: Slot) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    if let Ok(Err(error)) = tokio::time::timeout(limits.lifetime, connection).await {
        debug!(%error, "a connection failed");
    }
}

/// Number of open connections from each address.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Connections {
    /// Counts a connection until the returned slot is dropped. Returns `None` if a limit is reached.
    fn open(&self, address: IpAddr, limits: Limits) -> Option<Slot> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = open.values().sum();
        let own = open.get(&address).copied().unwrap_or_default();
        if total >= limits.connections || own >= limits.per_address {
            return None;
        }
        open.insert(address, own + 1);
        let connections = self.clone();
        Some(Slot {
            connections,
            address,
        })
    }
}

/// An open connection. It counts until this slot is dropped.
struct Slot {
    connections: Connections,
    address: IpAddr,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self
            .connections
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.address) {
            *count = count.saturating_sub(1);
        }
        open.retain(|_, count| *count > 0);
    }
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
    async fn readyz_fails_with_cause_until_process_is_ready() {
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

    #[test]
    fn readyz_lists_held_shards() {
        let readiness = Readiness::default();
        readiness.ready();
        assert_eq!(readiness.answer().1, "ok\n");
        let shards = Shards::divided(8);
        readiness.report_shards(shards.clone());
        assert_eq!(readiness.answer().1, "ok\nholds no shard of 8\n");
        shards.hold(3);
        shards.hold(5);
        assert_eq!(readiness.answer().1, "ok\nholds shards 3, 5 of 8\n");
        let undivided = Readiness::default();
        undivided.ready();
        undivided.report_shards(Shards::undivided());
        assert_eq!(undivided.answer().1, "ok\n");
    }

    #[tokio::test]
    async fn metrics_are_served_in_openmetrics_format() {
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

    async fn limited(limits: Limits) -> SocketAddr {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin {
            readiness: Readiness::default(),
            registry: Arc::default(),
        };
        tokio::spawn(serve_within(limits, listener, admin));
        address
    }

    /// Opens a connection from the loopback address `from`, and sends nothing.
    async fn idle(address: SocketAddr, from: &str) -> TcpStream {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        socket.connect(address).await.unwrap()
    }

    /// Waits until the server closes the connection.
    async fn is_closed(mut stream: TcpStream) -> bool {
        let closed = async {
            let mut rest = Vec::new();
            while let Ok(1..) = stream.read_buf(&mut rest).await {}
        };
        tokio::time::timeout(Duration::from_secs(5), closed)
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn slow_and_idle_connections_are_closed() {
        let address = limited(Limits {
            header: Duration::from_millis(100),
            ..LIMITS
        })
        .await;
        let silent = idle(address, "127.0.0.1").await;
        let mut slow = idle(address, "127.0.0.1").await;
        slow.write_all(b"GET /healthz HTTP/1.1\r\nHost: ")
            .await
            .unwrap();
        let mut kept = idle(address, "127.0.0.1").await;
        kept.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        for stream in [silent, slow, kept] {
            assert!(is_closed(stream).await);
        }
    }

    #[tokio::test]
    async fn connection_is_closed_at_maximum_lifetime() {
        let address = limited(Limits {
            lifetime: Duration::from_millis(100),
            ..LIMITS
        })
        .await;
        assert!(is_closed(idle(address, "127.0.0.1").await).await);
    }

    #[tokio::test]
    async fn admin_connections_are_limited_per_address() {
        let address = limited(Limits {
            per_address: 2,
            ..LIMITS
        })
        .await;
        let first = idle(address, "127.0.0.2").await;
        let second = idle(address, "127.0.0.2").await;
        assert!(is_closed(idle(address, "127.0.0.2").await).await);
        // The server answers a probe from 127.0.0.1, although 127.0.0.2 has reached the limit.
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        drop((first, second));
    }

    #[tokio::test]
    async fn admin_connections_are_limited_in_total() {
        let address = limited(Limits {
            connections: 2,
            ..LIMITS
        })
        .await;
        let first = idle(address, "127.0.0.2").await;
        let second = idle(address, "127.0.0.3").await;
        assert!(is_closed(idle(address, "127.0.0.4").await).await);
        // Closed connections do not count toward the limit, so a new connection is accepted.
        drop((first, second));
        let served = async {
            loop {
                let mut stream = idle(address, "127.0.0.4").await;
                let request = b"GET /healthz HTTP/1.0\r\n\r\n";
                let mut answer = String::new();
                if stream.write_all(request).await.is_ok()
                    && stream.read_to_string(&mut answer).await.is_ok()
                    && answer.contains("200 OK")
                {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), served)
            .await
            .unwrap();
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
