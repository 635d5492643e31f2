//! `ctl`: runs etcdctl for a cluster.

use crate::access::Access;
use crate::cli::CtlArgs;
use crate::console::note;
use crate::error::Result;
use crate::{etcdctl, members};
use kube::ResourceExt;

pub(super) async fn run(access: &Access, args: &CtlArgs) -> Result<u8> {
    let cluster = access.cluster(&args.cluster).await?;
    let pods = access.pods(&args.cluster).await?;
    let pod = members::choose(&args.cluster, &pods, args.member.as_deref())?;
    if args.local || etcdctl::needs_password(&cluster, &args.args) {
        if !args.local {
            note(&format!(
                "the cluster has authentication: the local etcdctl runs through a port-forward to pod {}",
                pod.name_any()
            ));
        }
        return etcdctl::attach_local(access, &cluster, pod, &args.args).await;
    }
    let one = args.member.is_some() || members::needs_one_endpoint(&args.args);
    let endpoints = if one {
        members::endpoints(std::slice::from_ref(pod))
    } else {
        members::endpoints(&pods)
    };
    etcdctl::attach(access, pod, &endpoints, &args.args, args.stdin).await
}
