//! The gRPC channel to a member. It adds the login token to requests and limits the size of responses.

use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::task::{Context, Poll};

use etcd_client::{BalancedChannelBuilder, Channel};
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response};
use http_body_util::Limited;
use tokio::sync::mpsc::Sender;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Service};

/// The gRPC header with the login token (`rpctypes.TokenFieldNameGRPC`).
const HEADER: &str = "token";
/// The call that issues a token. The channel adds no token to its request, because etcd would reject an expired token.
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
/// The call that streams a snapshot. The channel does not limit the size of the response, because it is a stream of
/// messages of at most 4 MiB each.
const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
/// The watch call. The channel does not limit the size of the response, because it is an endless stream. The caller
/// limits each message.
pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// The current login token of an etcd client.
pub(crate) type Token = Arc<RwLock<Option<HeaderValue>>>;

/// Creates connections to members. All connections share the login token of one etcd client.
pub(crate) struct MemberChannels {
    pub(crate) token: Token,
    /// Receives the channel of the new connection. Calls that the client library does not offer use this channel.
    pub(crate) created: Option<Arc<OnceLock<MemberChannel>>>,
    /// Maximum size of a response in bytes.
    pub(crate) max_answer: usize,
}

impl BalancedChannelBuilder for MemberChannels {
    type Error = tonic::transport::Error;

    fn balanced_channel(
        self,
        buffer_size: usize,
    ) -> Result<(Channel, Sender<Change<http::Uri, Endpoint>>), Self::Error> {
        let (channel, endpoints) = tonic::transport::Channel::balance_channel(buffer_size);
        let member = MemberChannel {
            channel,
            token: self.token,
            max_answer: self.max_answer,
        };
        if let Some(created) = self.created {
            let _ = created.set(member.clone());
        }
        Ok((Channel::Custom(BoxCloneSyncService::new(member)), endpoints))
    }
}

/// The channel of one connection, with the token of its etcd client.
#[derive(Clone)]
pub(crate) struct MemberChannel {
    channel: tonic::transport::Channel,
    token: Token,
    max_answer: usize,
}

impl Service<Request<Body>> for MemberChannel {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.channel.poll_ready(context).map_err(BoxError::from)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let token = self.token.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(token) = token.as_ref()
            && request.uri().path() != AUTHENTICATE
        {
            request.headers_mut().insert(HEADER, token.clone());
        }
        drop(token);
        let is_limited = ![SNAPSHOT, WATCH].contains(&request.uri().path());
        let max_answer = self.max_answer;
        let answer = self.channel.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(if is_limited {
                answer.map(|body| Body::new(Limited::new(body, max_answer)))
            } else {
                answer
            })
        })
    }
}
