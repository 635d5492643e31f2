//! Limits for the responses that the S3 client reads completely. The content of an object is read as a stream and has
//! no limit here.

use std::error::Error as StdError;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use aws_sdk_s3::config::interceptors::{
    BeforeDeserializationInterceptorContextMut, InterceptorContext,
};
use aws_sdk_s3::config::retry::{ClassifyRetry, RetryAction};
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_smithy_runtime_api::client::orchestrator::Metadata;
use aws_smithy_types::body::SdkBody;
use bytes::Bytes;
use http_body::{Body, Frame};

use crate::failure::Place;
use crate::limits::{MAX_ANSWER, MAX_PAGE, MIN_CHUNK, too_long};
use crate::port::Error;

/// Maximum number of XML tags in a response. A page of 1,000 entries has at most 28,000 tags. The client needs up to
/// 300 bytes of memory for an empty entry, which is one tag.
const MAX_TAGS: usize = 64_000;

/// The limit that a response exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Exceeded {
    #[error("the response has more than {0} bytes")]
    Bytes(usize),
    #[error("the response has more than {} XML tags", MAX_TAGS)]
    Tags,
}

impl Exceeded {
    /// The limit that caused the error. `None` if the error has another cause.
    pub(super) fn of(error: &(dyn StdError + 'static)) -> Option<Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(exceeded) = error.downcast_ref::<Self>() {
                return Some(*exceeded);
            }
            next = error.source();
        }
        None
    }

    pub(super) fn explain(self, place: &Place) -> Error {
        match self {
            Self::Bytes(limit) => too_long(place, limit),
            Self::Tags => place.excessive(
                "sends a list with more entries than one page may have: check that the endpoint is an object store".to_owned(),
            ),
        }
    }
}

/// Limits the size of each response before the client reads it.
#[derive(Debug)]
pub(super) struct LimitResponses;

impl Intercept for LimitResponses {
    fn name(&self) -> &'static str {
        "LimitResponses"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _runtime_components: &RuntimeComponents,
        cfg: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let operation = cfg.load::<Metadata>().map_or("", Metadata::name);
        let response = context.response_mut();
        let limit = match (operation, response.status().is_success()) {
            // The content of an object is read as a stream, so its length is not limited.
            ("GetObject", true) => return Ok(()),
            ("ListObjectsV2" | "ListMultipartUploads", true) => MAX_PAGE,
            _ => MAX_ANSWER,
        };
        let body = LimitedBody {
            body: response.take_body(),
            limit,
            left: limit,
            tags_left: MAX_TAGS,
        };
        *response.body_mut() = SdkBody::from_body_1_x(body);
        Ok(())
    }
}

/// Prevents the retry of a request whose response exceeds a limit.
#[derive(Debug)]
pub(super) struct NoRetryOfTooLong;

impl ClassifyRetry for NoRetryOfTooLong {
    fn classify_retry(&self, context: &InterceptorContext) -> RetryAction {
        match context.output_or_error() {
            Some(Err(error)) if Exceeded::of(error).is_some() => RetryAction::RetryForbidden,
            _ => RetryAction::NoActionIndicated,
        }
    }

    fn name(&self) -> &'static str {
        "NoRetryOfTooLong"
    }
}

/// A body that fails after a number of bytes or XML tags. Counts the received bytes, because the announced length may
/// be wrong.
struct LimitedBody {
    body: SdkBody,
    limit: usize,
    left: usize,
    tags_left: usize,
}

impl LimitedBody {
    fn count(&mut self, data: &[u8]) -> Result<(), Exceeded> {
        let left = self.left.checked_sub(data.len().max(MIN_CHUNK));
        self.left = left.ok_or(Exceeded::Bytes(self.limit))?;
        let tags = data.split(|byte| *byte == b'<').count().saturating_sub(1);
        let left = self.tags_left.checked_sub(tags);
        self.tags_left = left.ok_or(Exceeded::Tags)?;
        Ok(())
    }
}

impl Body for LimitedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(exceeded) = this.count(data)
        {
            return Poll::Ready(Some(Err(exceeded.into())));
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(limit: usize) -> LimitedBody {
        LimitedBody {
            body: SdkBody::empty(),
            limit,
            left: limit,
            tags_left: MAX_TAGS,
        }
    }

    #[test]
    fn hostile_store_response_is_limited_by_bytes_and_tags() {
        let data = vec![b'x'; 100_000];
        let counted = |limit: usize, data: &[u8]| {
            let mut body = body(limit);
            (0..2 * limit)
                .take_while(|_| body.count(data).is_ok())
                .count()
        };
        assert_eq!(counted(1 << 20, &data), 10);
        // A chunk of one byte counts as `MIN_CHUNK` bytes.
        assert_eq!(counted(1 << 20, b"x"), (1 << 20) / MIN_CHUNK);
        // A body of empty entries reaches the limit for tags before the limit for bytes.
        let empty = b"<Contents/>".repeat(1_000);
        assert_eq!(counted(MAX_PAGE, &empty), MAX_TAGS / 1_000);
    }

    #[test]
    fn exceeded_response_limit_is_found_in_error_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] BoxError);
        let error = Outer(Box::new(Outer(Exceeded::Bytes(7).into())));
        assert_eq!(Exceeded::of(&error), Some(Exceeded::Bytes(7)));
        assert_eq!(Exceeded::of(&Outer("other".into())), None);
    }
}
