//! Converts errors of etcd and of the connection into [`Error`]. Performs no I/O.

use std::error::Error as StdError;

use http_body_util::LengthLimitError;

use crate::limits::MAX_ANSWER;
use crate::port::Error;

/// gRPC status codes with their numbers.
mod code {
    pub(super) const DEADLINE_EXCEEDED: i32 = 4;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const FAILED_PRECONDITION: i32 = 9;
    pub(super) const UNAVAILABLE: i32 = 14;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

/// etcd's error for the promotion of a member that is already a voter.
pub(crate) const ALREADY_VOTER: &str = "etcdserver: can only promote a learner member";

/// etcd's error for a compacted revision ends with this text.
pub(crate) const COMPACTED: &str = "required revision has been compacted";

/// etcd's errors for a user or role that already exists.
pub(crate) const USER_EXISTS: &str = "user name already exists";
pub(crate) const ROLE_EXISTS: &str = "role name already exists";

/// etcd's error for a read that an election interrupts ends with this text.
pub(crate) const LEADER_CHANGED: &str = "leader changed";

/// The error with which a learner rejects every call except `Status`.
pub(crate) const NOT_FOR_LEARNER: &str = "etcdserver: rpc not supported for learner";

/// A member rejects a change of the member list with this error if it regards too few members as connected. The member
/// has then not proposed the change to the other members. Of two connected members, one can regard the other as
/// disconnected until one of them restarts (etcd issue 14523).
pub(crate) const UNHEALTHY: &str = "etcdserver: unhealthy cluster";

/// Converts an error of the client library. `endpoint` is the member that was called. Returns [`Error::AnswerLost`] if
/// the connection broke after it was established, because etcd may then have received the request.
pub(crate) fn classify(endpoint: &str, error: &etcd_client::Error) -> Error {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            // If the status has a source error, the client library created the status, and etcd sent none.
            if let Some(cause) = status.source() {
                if is_too_long(cause) {
                    let limit = MAX_ANSWER >> 10;
                    return Error::Other(format!(
                        "{endpoint}: the response has more than {limit} KiB: check that the endpoint is an etcd member"
                    ));
                }
                return transport(endpoint, cause);
            }
            answered(endpoint, status.code() as i32, status.message())
        }
        etcd_client::Error::TransportError(cause) => transport(endpoint, cause),
        etcd_client::Error::IoError(cause) => transport(endpoint, cause),
        other => Error::Other(format!("{endpoint}: {other}")),
    }
}

fn is_too_long(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<LengthLimitError>() {
            return true;
        }
        next = error.source();
    }
    false
}

fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// Whether the connection was never established, so that etcd certainly did not receive the request.
fn is_unsent(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        next = error.source();
    }
    false
}

fn transport(endpoint: &str, cause: &(dyn StdError + 'static)) -> Error {
    const TLS_WORDS: [&str; 4] = ["certificate", "handshake", "InvalidContentType", "tls"];
    // `CLOSED` lists texts of errors after the peer closed the connection. These errors are not TLS errors, although
    // their texts contain some of `TLS_WORDS`.
    const CLOSED: [&str; 2] = ["close_notify", "handshake eof"];
    let text = chain(cause);
    let full = format!("{endpoint}: {text}");
    let closed = CLOSED.iter().any(|word| text.contains(word));
    if !closed && TLS_WORDS.iter().any(|word| text.contains(word)) {
        // If the TLS handshake fails, etcd has not read the request. With TLS 1.3, the client may already have sent
        // it.
        Error::Tls(full)
    } else if is_unsent(cause) {
        Error::Unreachable(full)
    } else {
        Error::AnswerLost(full)
    }
}

/// Converts the error of a read: [`Error::AnswerLost`] becomes [`Error::Unreachable`], because a read changes nothing
/// and can be repeated.
pub(crate) fn of_read(error: Error) -> Error {
    match error {
        Error::AnswerLost(text) => Error::Unreachable(text),
        error => error,
    }
}

/// Converts an error response of etcd. The error texts come from etcd's `rpctypes`, and have not changed since 3.4.
fn answered(endpoint: &str, code: i32, message: &str) -> Error {
    let full = || format!("{endpoint}: {}", message.trim_start_matches("etcdserver: "));
    if message.contains("member not found") {
        return Error::MemberNotFound;
    }
    // etcd computes a member ID from the peer URLs and the current second. "member ID already exist" therefore also
    // means that the peer URLs exist: another member with these URLs was added in the same second.
    if message.contains("Peer URLs already exists") || message.contains("member ID already exist") {
        return Error::PeerUrlExists;
    }
    if message == ALREADY_VOTER {
        return Error::Other(full());
    }
    if message.contains("request timed out") || code == code::DEADLINE_EXCEEDED {
        return Error::Timeout(full());
    }
    if code == code::PERMISSION_DENIED
        || code == code::UNAUTHENTICATED
        || [
            "authentication failed",
            "invalid auth token",
            "user name is empty",
            "user name not found",
            "permission denied",
        ]
        .iter()
        .any(|text| message.contains(text))
    {
        return Error::AccessDenied(full());
    }
    match code {
        code::UNAVAILABLE | code::RESOURCE_EXHAUSTED | code::FAILED_PRECONDITION => {
            Error::Unavailable(full())
        }
        _ => Error::Other(full()),
    }
}

/// Selects the most useful error of several members. A response from etcd takes precedence over a missing response.
pub(crate) fn most_specific(errors: Vec<Error>) -> Error {
    fn rank(error: &Error) -> u8 {
        match error {
            Error::MemberNotFound | Error::PeerUrlExists => 0,
            Error::AccessDenied(_) => 1,
            Error::Other(_) => 2,
            Error::Unavailable(_) => 3,
            Error::Timeout(_) | Error::AnswerLost(_) => 4,
            Error::Tls(_) => 5,
            Error::Unreachable(_) => 6,
        }
    }
    if errors
        .iter()
        .all(|error| matches!(error, Error::Unreachable(_)))
    {
        let texts: Vec<String> = errors
            .into_iter()
            .filter_map(|error| match error {
                Error::Unreachable(text) => Some(text),
                _ => None,
            })
            .collect();
        return Error::Unreachable(if texts.is_empty() {
            "no client URL is known".to_owned()
        } else {
            texts.join("; ")
        });
    }
    errors
        .into_iter()
        .min_by_key(rank)
        .unwrap_or_else(|| Error::Unreachable("no client URL is known".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_rejections_are_classified_as_unavailable() {
        for (code, message) in [
            (14, UNHEALTHY),
            (14, "etcdserver: no leader"),
            (14, "etcdserver: leader changed"),
            (9, "etcdserver: too many learner members in cluster"),
            (
                9,
                "etcdserver: can only promote a learner member which is in sync with leader",
            ),
            (
                9,
                "etcdserver: re-configuration failed due to not enough started members",
            ),
            (9, "etcdserver: not leader"),
            (9, NOT_FOR_LEARNER),
            (8, "etcdserver: too many requests"),
        ] {
            assert!(
                matches!(answered("e", code, message), Error::Unavailable(_)),
                "{message}"
            );
        }
    }

    #[test]
    fn etcd_errors_are_classified_by_cause() {
        assert!(matches!(
            answered("e", 5, "etcdserver: member not found"),
            Error::MemberNotFound
        ));
        assert!(matches!(
            answered("e", 9, "etcdserver: Peer URLs already exists"),
            Error::PeerUrlExists
        ));
        assert!(matches!(
            answered("e", 14, "etcdserver: request timed out"),
            Error::Timeout(_)
        ));
        assert!(matches!(
            answered(
                "e",
                3,
                "etcdserver: authentication failed, invalid user ID or password"
            ),
            Error::AccessDenied(_)
        ));
        assert!(matches!(
            answered("e", 15, "etcdserver: corrupt cluster"),
            Error::Other(_)
        ));
    }

    #[test]
    fn error_response_takes_precedence_over_unreachable_member() {
        let error = most_specific(vec![
            Error::Unreachable("a".into()),
            Error::Unavailable("b: no leader".into()),
            Error::Timeout("c".into()),
        ]);
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
    }

    #[test]
    fn error_lists_every_unreachable_member() {
        let error = most_specific(vec![
            Error::Unreachable("a: refused".into()),
            Error::Unreachable("b: refused".into()),
        ]);
        assert_eq!(
            error.to_string(),
            "no member could be reached: a: refused; b: refused"
        );
    }
}
