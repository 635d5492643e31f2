//! Errors for users. The text of an error names the failed step. Most errors have a remedy, and each error has an exit
//! code.

use std::path::PathBuf;

use thiserror::Error;

/// Exit code of a failed command.
pub const CODE_FAILED: u8 = 1;
/// Exit code if the command was refused or not confirmed, so that nothing was changed.
pub const CODE_REFUSED: u8 = 3;
/// Exit code if a wait has reached its time limit.
pub const CODE_TIMEOUT: u8 = 4;
/// Exit code if the awaited object failed.
pub const CODE_ENDED_BADLY: u8 = 5;

/// Result of a command.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The kubeconfig is missing or invalid.
    #[error("the kubeconfig cannot be read")]
    Kubeconfig(#[source] kube::config::KubeconfigError),
    /// No client can be built from the kubeconfig.
    #[error("no client can be built from the kubeconfig")]
    Client(#[source] kube::Error),
    /// The API server rejected a request, or did not answer.
    #[error("cannot {verb} {object}")]
    Request {
        /// The verb of the request: get, list, patch, create, delete.
        verb: &'static str,
        /// The object of the request, such as `etcdcluster/main in namespace prod`.
        object: String,
        /// The error response of the API server, or the error of the connection.
        #[source]
        source: Box<kube::Error>,
    },
    /// An object does not exist.
    #[error("{object} does not exist")]
    Missing {
        /// The object, such as `etcdcluster/main`.
        object: String,
        /// What the user must do.
        remedy: String,
    },
    /// The command was refused, and nothing was changed.
    #[error("{message}")]
    Refused {
        /// Why the command was refused.
        message: String,
        /// What the user must do.
        remedy: String,
    },
    /// etcdctl could not be started in a container, or did not end within its time limit.
    #[error("cannot run etcdctl in pod {pod}: {message}")]
    Exec {
        /// Name of the pod.
        pod: String,
        /// Why etcdctl was not started, or that it did not end within the time limit.
        message: String,
    },
    /// etcdctl ended with an exit code that is not 0.
    #[error("etcdctl failed for member {member}: {message}")]
    Etcdctl {
        /// Name of the member.
        member: String,
        /// The error message of etcdctl.
        message: String,
    },
    /// The local etcdctl cannot be started.
    #[error("etcdctl cannot be started on this machine")]
    Local(#[source] std::io::Error),
    /// An object did not reach the awaited state within the time limit.
    #[error("{object} did not become {goal} within {seconds} s: {last}")]
    TimedOut {
        /// The object, such as `etcdcluster/main`.
        object: String,
        /// The awaited state, such as `ready`.
        goal: &'static str,
        /// The time limit of the wait.
        seconds: u64,
        /// The last observed state of the object.
        last: String,
    },
    /// The awaited object has failed.
    #[error("{object} failed: {message}")]
    EndedBadly {
        /// The object, such as `etcdcluster/main`.
        object: String,
        /// Why the object failed.
        message: String,
    },
    /// A file could not be written or read.
    #[error("{}", .path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The output could not be written.
    #[error("the output cannot be written")]
    Output(#[from] std::io::Error),
    /// An object could not be formatted as JSON or YAML.
    #[error("an object cannot be written as {0}")]
    Format(&'static str),
}

impl Error {
    /// Builds the error for a refused command.
    pub fn refused(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Refused {
            message: message.into(),
            remedy: remedy.into(),
        }
    }

    /// What the user must do. `None` if the remedy is unknown.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Kubeconfig(_) | Self::Client(_) => Some(
                "check --kubeconfig, --context and the variable KUBECONFIG; `kubectl config get-contexts` lists the contexts".into(),
            ),
            Self::Request { verb, object, source } => request_remedy(verb, object, source),
            Self::Missing { remedy, .. } | Self::Refused { remedy, .. } => Some(remedy.clone()),
            Self::Exec { .. } => Some(
                "check that the pod runs, and that you have the verbs create and get for pods/exec (`kubectl auth can-i create pods/exec`)".into(),
            ),
            Self::Local(_) => Some(
                "install etcdctl of the version of the cluster, and add its directory to PATH".into(),
            ),
            Self::TimedOut { .. } => Some(
                "the operator continues its work: `kubectl etcd plan` names the cause of the delay. To wait longer, set --timeout".into(),
            ),
            Self::Etcdctl { .. } | Self::EndedBadly { .. } | Self::File { .. } | Self::Output(_) | Self::Format(_) => None,
        }
    }

    /// The exit code of the program for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused { .. } => CODE_REFUSED,
            Self::TimedOut { .. } => CODE_TIMEOUT,
            Self::EndedBadly { .. } => CODE_ENDED_BADLY,
            _ => CODE_FAILED,
        }
    }

    /// The error and all its causes in one line.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        if let Self::Request { source, .. } = self
            && let kube::Error::Api(answer) = source.as_ref()
        {
            // Only the message of the response is shown, because kube's error text contains all fields of the
            // response.
            return format!("{text}: {}", answer.message);
        }
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            let cause_text = cause.to_string();
            // The text of a cause is appended only once, because some errors already contain the text of their cause.
            if !text.contains(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            next = cause.source();
        }
        text
    }
}

fn request_remedy(verb: &str, object: &str, source: &kube::Error) -> Option<String> {
    match source {
        kube::Error::Api(answer) if answer.code == 403 => Some(format!(
            "ask an administrator for the right to {verb} {object}"
        )),
        kube::Error::Api(answer) if answer.code == 401 => {
            Some("log in again: the API server did not accept your credentials".into())
        }
        kube::Error::Api(answer) if answer.code == 404 => Some(
            "check the name, the namespace (-n) and the context (--context). If the kind is unknown, the CRDs are not installed".into(),
        ),
        kube::Error::Api(answer) if [400, 422].contains(&answer.code) => {
            Some("correct the field that the message names".into())
        }
        kube::Error::Api(answer) if answer.code == 409 => {
            Some("the object has changed meanwhile, or exists already: run the command again".into())
        }
        kube::Error::Api(_) => None,
        _ => Some("check that the API server of the context is reachable".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16) -> Error {
        let status = serde_json::json!({
            "status": "Failure", "message": "no", "reason": "x", "code": code
        });
        let status = serde_json::from_value(status).unwrap();
        Error::Request {
            verb: "get",
            object: "etcdcluster/main in namespace prod".into(),
            source: Box::new(kube::Error::Api(status)),
        }
    }

    #[test]
    fn request_errors_name_object_and_remedy() {
        for (code, part) in [
            (403, "the right to get etcdcluster/main in namespace prod"),
            (401, "log in again"),
            (404, "the namespace (-n)"),
            (400, "the field"),
            (422, "the field"),
            (409, "run the command again"),
        ] {
            let error = answer(code);
            assert!(error.remedy().unwrap().contains(part), "{code}");
            assert_eq!(
                error.chain(),
                "cannot get etcdcluster/main in namespace prod: no"
            );
            assert_eq!(error.exit_code(), CODE_FAILED);
        }
        assert_eq!(answer(500).remedy(), None);
    }

    #[test]
    fn refusal_timeout_and_failure_have_different_exit_codes() {
        let refused = Error::refused("a", "b");
        let timeout = Error::TimedOut {
            object: "a".into(),
            goal: "ready",
            seconds: 1,
            last: String::new(),
        };
        let ended = Error::EndedBadly {
            object: "a".into(),
            message: "b".into(),
        };
        let codes = [refused, timeout, ended].map(|error| error.exit_code());
        assert_eq!(codes, [CODE_REFUSED, CODE_TIMEOUT, CODE_ENDED_BADLY]);
    }
}
