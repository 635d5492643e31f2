//! Runs the controller of EtcdMirrors. The process of the backup operator contains it ([`Mirrors`]).

use std::num::NonZeroUsize;
use std::sync::Arc;

use api::EtcdMirror;
use clap::Args;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use kube::core::ApiResource;
use runtime::Operator;
use runtime::controller::{Controllers, drive};
use runtime::crd;
use runtime::endpoints::EndpointGrants;
use runtime::process::Objects;
use runtime::slots::SlotLimits;
use tokio::sync::mpsc;

use crate::metrics::MirrorMetrics;
use crate::reconcile::ReconcileContext;
use crate::tasks::Tasks;

/// Settings of an administrator for all EtcdMirrors.
#[derive(Args, Clone, Copy, Debug)]
pub struct MirrorSettings {
    /// Number of mirrors that run at the same time. Each needs up to 100 MiB of memory. If the operator manages several
    /// namespaces, one namespace gets at most half of them
    #[arg(long, value_name = "NUMBER", default_value = "4")]
    pub max_mirrors: NonZeroUsize,
}

impl MirrorSettings {
    fn limits(self, is_shared: bool) -> SlotLimits {
        let concurrent = self.max_mirrors.get();
        SlotLimits {
            concurrent,
            per_store: concurrent,
            per_namespace: if is_shared {
                concurrent.div_ceil(2)
            } else {
                concurrent
            },
        }
    }
}

/// The controller of EtcdMirrors.
pub struct Mirrors {
    operator: Operator,
    controllers: Controllers<EtcdMirror>,
    reconciler: Arc<ReconcileContext>,
    create_crd: bool,
}

impl Mirrors {
    /// Creates the controller. `create_crd`: the operator may create or update the CRD.
    pub fn new(
        operator: &Operator,
        settings: MirrorSettings,
        endpoints: EndpointGrants,
        create_crd: bool,
    ) -> Self {
        let (changes, requests) = mpsc::unbounded_channel();
        let controllers = Controllers::<EtcdMirror>::new(operator).reconcile_on(requests);
        let limits = settings.limits(operator.scope.is_shared());
        let reconciler = Arc::new(ReconcileContext {
            client: operator.client.clone(),
            endpoints,
            tasks: Tasks::new(limits, operator.shutdown.clone(), changes),
            objects: controllers.cache(),
            scope: operator.scope.clone(),
            max_mirrors: limits.concurrent,
        });
        Self {
            // The EtcdMirrors have a separate count, so that the metric of managed objects counts only EtcdBackups.
            operator: Operator {
                objects: Objects::default(),
                ..operator.clone()
            },
            controllers,
            reconciler,
            create_crd,
        }
    }

    /// The metrics of all EtcdMirrors.
    pub fn metrics(&self) -> MirrorMetrics {
        MirrorMetrics {
            objects: self.reconciler.objects.clone(),
            tasks: self.reconciler.tasks.clone(),
        }
    }

    /// Runs the controller until the shutdown. Waits for the CRD first, because earlier releases have not installed it.
    /// The controller of EtcdBackups does not wait for this CRD (invariant 15).
    pub async fn run(self) {
        let Self {
            operator,
            controllers,
            reconciler,
            create_crd,
        } = self;
        let kind = ApiResource::erase::<EtcdMirror>(&());
        let crd: &(dyn Fn() -> CustomResourceDefinition + Sync) = &EtcdMirror::crd;
        let create = create_crd.then_some(crd);
        let available = crd::available(&operator.client, &kind, create, &operator.scope);
        tokio::select! {
            () = available => {}
            () = operator.shutdown.cancelled() => return,
        }
        drive(&operator, controllers, reconciler.clone()).await;
        reconciler.tasks.join().await;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: MirrorSettings,
    }

    #[test]
    fn namespace_gets_half_of_concurrent_mirrors_of_shared_operator() {
        let limits = |arguments: &[&str], is_shared: bool| {
            let all = std::iter::once("backup").chain(arguments.iter().copied());
            let limits = Flags::parse_from(all).settings.limits(is_shared);
            (limits.concurrent, limits.per_namespace)
        };
        assert_eq!(limits(&[], false), (4, 4));
        assert_eq!(limits(&[], true), (4, 2));
        assert_eq!(limits(&["--max-mirrors=1"], true), (1, 1));
        assert!(Flags::try_parse_from(["backup", "--max-mirrors=0"]).is_err());
    }
}
