//! Plans the changes of a role: its creation, its permissions, and its deletion.

use std::collections::BTreeMap;

use api::EtcdRole;
use api::access::PermissionAccess;
use etcd::{KeyAccess, KeyPermission, PermissionRange};

use super::gate::{Entry, admit, deletion};
use super::{Call, Plan};
use crate::reason::{Reason, Trouble};
use crate::snapshot::RoleSnapshot;

pub(crate) fn plan_role(role: &EtcdRole, seen: &RoleSnapshot) -> Plan {
    let wanted = permissions(role);
    let entry = match &seen.found {
        Err(trouble) => Err(trouble),
        Ok(None) => Ok(Entry::Missing),
        Ok(Some(found)) => Ok(Entry::Exists {
            is_partial: found
                .iter()
                .all(|one| wanted.get(&one.range) == Some(&one.access)),
            is_root: false,
        }),
    };
    let target = (&seen.cluster, seen.rivals.as_slice());
    if role.metadata.deletion_timestamp.is_some() {
        return deletion(role, target, entry, Call::DeleteRole);
    }
    let admitted = match admit(role, target, entry, |_, _| None) {
        Ok(admitted) => admitted,
        Err(plan) => return *plan,
    };
    let mut plan = Plan::new(Trouble::new(
        Reason::AsDesired,
        format!(
            "the role {} of EtcdCluster {} is up to date (permissions: {})",
            role.etcd_name(),
            role.spec.etcd_cluster.name,
            wanted.len()
        ),
    ));
    plan.record = admitted.record;
    let found = seen.found.as_ref().ok().and_then(Option::as_deref);
    if found.is_none() {
        plan.call(Call::CreateRole);
    }
    let found = found.unwrap_or_default();
    // Grants come before revocations, so that clients keep their access while the range of a permission changes.
    for (range, access) in &wanted {
        let permission = KeyPermission {
            range: range.clone(),
            access: *access,
        };
        if !found.contains(&permission) {
            plan.call(Call::GrantPermission(permission));
        }
    }
    for one in found.iter().filter(|one| !wanted.contains_key(&one.range)) {
        plan.call(Call::RevokePermission(one.range.clone()));
    }
    plan
}

/// The permissions in the spec. Invalid permissions are left out, and `validate_role` reports them.
fn permissions(role: &EtcdRole) -> BTreeMap<PermissionRange, KeyAccess> {
    let permissions = role.spec.permissions.iter();
    let valid = permissions.filter_map(|permission| {
        let (key, end) = permission.range()?;
        let access = match permission.access {
            PermissionAccess::Read => KeyAccess::Read,
            PermissionAccess::Write => KeyAccess::Write,
            PermissionAccess::ReadWrite => KeyAccess::ReadWrite,
            PermissionAccess::Unknown(_) => return None,
        };
        Some((PermissionRange { key, end }, access))
    });
    valid.collect()
}
