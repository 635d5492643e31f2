//! Settings of the tests, from environment variables that `cargo xtask test`, `demo` and `bench` set.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use kube::client::ClientBuilder;
use tower::buffer::BufferLayer;
use tower::retry::RetryLayer;

use crate::retry::RetryPolicy;

/// The settings of the tests, from environment variables.
#[derive(Clone, Debug)]
pub struct Env {
    /// The image of the operators, as `repository:tag`. Every node has this image.
    pub image: String,
    /// The directory of the chart that the tests install.
    pub chart: PathBuf,
    /// The kubeconfig context that the tests use. `None` selects the current context.
    pub context: Option<String>,
    /// The S3 server that pods and tests use. `None` if it is not configured.
    pub s3: Option<S3>,
    /// The etcd versions whose images the nodes have, such as `3.6.5`, the oldest first.
    pub etcd_versions: Vec<String>,
    /// The `xtask` executable that started the testbed. `None` on a user's cluster.
    pub xtask: Option<PathBuf>,
    /// The IP family of the testbed's pods and Services, such as `IPv6`. `None` on a user's cluster.
    pub ip_family: Option<String>,
    /// The names of the testbed's nodes.
    pub nodes: Vec<String>,
    /// The image and the chart of the operators that `cargo xtask test --previous COMMIT` built. `None` without
    /// `--previous`.
    pub previous: Option<Previous>,
    /// The executable of the operators on this machine. `None` outside of `cargo xtask bench`.
    pub operator: Option<OperatorProgram>,
}

/// The executable of the operators on this machine.
#[derive(Clone, Debug)]
pub struct OperatorProgram {
    /// The path of the executable.
    pub program: PathBuf,
    /// The compilation profile of the executable: `release` or `fast`.
    pub profile: String,
}

/// The image and the chart of the operators, built from an earlier commit.
#[derive(Clone, Debug)]
pub struct Previous {
    /// The image of the operators. Every node has this image.
    pub image: String,
    /// The directory of the chart of the earlier commit.
    pub chart: PathBuf,
}

/// An S3 server with credentials for full access.
#[derive(Clone, Debug)]
pub struct S3 {
    /// The URL of the server. Pods and tests can connect to it.
    pub endpoint: String,
    /// The access key ID.
    pub access_key: String,
    /// The secret access key.
    pub secret_key: String,
    /// The region for the signatures of the requests.
    pub region: String,
}

impl Env {
    /// Reads the settings from the environment variables.
    ///
    /// # Errors
    /// Fails if a variable is missing. The error says how to set the variable.
    pub fn from_vars() -> Result<Self> {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let need = |name: &str| {
            var(name).with_context(|| {
                format!("{name} is not set: run the tests with `cargo xtask test`, or set it as CONTRIBUTING.md describes")
            })
        };
        let list = |name: &str| -> Vec<String> {
            let text = var(name).unwrap_or_default();
            text.split(',')
                .map(|word| word.trim().to_owned())
                .filter(|word| !word.is_empty())
                .collect()
        };
        let s3 = match (
            var("E2E_S3_ENDPOINT"),
            var("E2E_S3_ACCESS_KEY"),
            var("E2E_S3_SECRET_KEY"),
        ) {
            (Some(endpoint), Some(access_key), Some(secret_key)) => Some(S3 {
                endpoint,
                access_key,
                secret_key,
                region: var("E2E_S3_REGION").unwrap_or_else(|| "us-east-1".to_owned()),
            }),
            (None, None, None) => None,
            _ => bail!(
                "E2E_S3_ENDPOINT, E2E_S3_ACCESS_KEY and E2E_S3_SECRET_KEY belong together: set all three or none"
            ),
        };
        let previous = match (var("E2E_PREVIOUS_IMAGE"), var("E2E_PREVIOUS_CHART")) {
            (Some(image), Some(chart)) => Some(Previous {
                image,
                chart: chart.into(),
            }),
            (None, None) => None,
            _ => {
                bail!("E2E_PREVIOUS_IMAGE and E2E_PREVIOUS_CHART belong together: set both or none")
            }
        };
        let operator = var("E2E_OPERATOR").map(|program| OperatorProgram {
            program: program.into(),
            profile: var("E2E_PROFILE").unwrap_or_default(),
        });
        Ok(Self {
            previous,
            operator,
            image: need("E2E_IMAGE")?,
            chart: need("E2E_CHART")?.into(),
            context: var("E2E_CONTEXT"),
            s3,
            etcd_versions: list("E2E_ETCD_VERSIONS"),
            xtask: var("E2E_XTASK").map(Into::into),
            ip_family: var("E2E_IP_FAMILY"),
            nodes: list("E2E_NODES"),
        })
    }

    /// The configured S3 server.
    ///
    /// # Errors
    /// Fails if no server is configured. The error names the variables to set.
    pub fn s3(&self) -> Result<&S3> {
        self.s3.as_ref().context(
            "no S3 server: set E2E_S3_ENDPOINT, E2E_S3_ACCESS_KEY and E2E_S3_SECRET_KEY (the testbed sets them)",
        )
    }

    /// A copy of these settings with the image and the chart of the earlier commit.
    ///
    /// # Errors
    /// Fails without `cargo xtask test --previous`.
    pub fn of_previous(&self) -> Result<Self> {
        let previous = self.previous.clone();
        let Previous { image, chart } = previous.context(
            "no image of an earlier commit: run the test with `cargo xtask test --e2e --previous COMMIT`",
        )?;
        Ok(Self {
            image,
            chart,
            ..self.clone()
        })
    }

    /// The newest etcd release of a minor version, such as `3.5`, whose image the nodes have.
    ///
    /// # Errors
    /// Fails if the nodes have no such image.
    pub fn newest_of(&self, minor: &str) -> Result<String> {
        let newest = self.of_minor(minor).next_back();
        newest.with_context(|| format!("no node has an image of etcd {minor}"))
    }

    /// The oldest and the newest etcd release of a minor version, such as `3.5`, whose images the nodes have.
    ///
    /// # Errors
    /// Fails if the nodes have fewer than two such images.
    pub fn oldest_and_newest_of(&self, minor: &str) -> Result<(String, String)> {
        let mut known = self.of_minor(minor);
        let both = known.next().zip(known.next_back());
        both.with_context(|| {
            format!("the nodes do not have two releases of etcd {minor}: list both in E2E_ETCD_VERSIONS, oldest first")
        })
    }

    fn of_minor(&self, minor: &str) -> impl DoubleEndedIterator<Item = String> {
        let prefix = format!("{minor}.");
        let known = self.etcd_versions.iter().cloned();
        known.filter(move |version| version.starts_with(&prefix))
    }

    /// The repository and the tag of the operators' image.
    #[must_use]
    pub fn image_parts(&self) -> (&str, &str) {
        self.image
            .rsplit_once(':')
            .unwrap_or((&self.image, "latest"))
    }

    /// A client for the Kubernetes cluster under test.
    ///
    /// # Errors
    /// Fails if the kubeconfig or its context cannot be used.
    pub async fn client(&self) -> Result<kube::Client> {
        let options = kube::config::KubeConfigOptions {
            context: self.context.clone(),
            ..Default::default()
        };
        let mut config = kube::Config::from_kubeconfig(&options)
            .await
            .context("no usable kubeconfig: set KUBECONFIG, or use `cargo xtask testbed env`")?;
        // Only a broken connection reaches this timeout, because the API server answers every request and closes
        // every idle watch earlier.
        config.read_timeout = Some(std::time::Duration::from_secs(310));
        // `BufferLayer` makes the client cloneable, which the retry layer requires.
        let client = ClientBuilder::try_from(config)?.with_layer(&BufferLayer::new(1024));
        Ok(client
            .with_layer(&RetryLayer::new(RetryPolicy::default()))
            .build())
    }
}
