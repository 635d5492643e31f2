{{/* Value of the label app.kubernetes.io/name. */}}
{{- define "etcd-operator.label" -}}
{{ .Values.nameOverride | default "etcd-operator" }}
{{- end }}

{{/* Name of objects that all operators share. */}}
{{- define "etcd-operator.fullname" -}}
{{ .Values.fullnameOverride | default "etcd-operator" }}
{{- end }}

{{/* Name of the objects of an operator. Call with (dict "root" $ "operator" <name of the binary>). */}}
{{- define "etcd-operator.name" -}}
{{- if .root.Values.fullnameOverride }}
{{- .root.Values.fullnameOverride }}{{ get (dict "etcd-backup-operator" "-backup" "etcd-restore-operator" "-restore") .operator }}
{{- else }}
{{- .operator }}
{{- end }}
{{- end }}

{{- define "etcd-operator.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{/* Labels for selectors, which never change. Call with (dict "root" $ "component" <operator or part>). */}}
{{- define "etcd-operator.selector" -}}
app.kubernetes.io/name: {{ include "etcd-operator.label" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels and annotations of every object and pod. Additional labels cannot change the chart's own. Call with
     (dict "root" $ "component" <operator or part> "labels" <additional> "annotations" <additional>). */}}
{{- define "etcd-operator.marks" -}}
{{- $own := include "etcd-operator.selector" . | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
labels:
  {{- toYaml (merge $own (.labels | default dict) .root.Values.commonLabels) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Metadata of an object in the release's namespace. Call with the arguments of etcd-operator.marks and "name". */}}
{{- define "etcd-operator.metadata" -}}
name: {{ .name }}
namespace: {{ include "etcd-operator.namespace" .root | quote }}
{{ include "etcd-operator.marks" . }}
{{- end }}

{{/* image.registry and global.imageRegistry replace the registry in image.repository. As for container runtimes, the
     first part of a repository is a registry if it is localhost or has a dot or a port. */}}
{{- define "etcd-operator.image" -}}
{{- $repository := .Values.image.repository }}
{{- with .Values.global.imageRegistry | default .Values.image.registry }}
{{- $repository = printf "%s/%s" . (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") }}
{{- end }}
{{- $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The fields that all pods of the release have in their spec. */}}
{{- define "etcd-operator.podSpec" -}}
{{- $secrets := list }}
{{- range concat (.Values.global.imagePullSecrets | default list) .Values.imagePullSecrets }}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- with $secrets | uniq }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The fields that all containers of the release have. */}}
{{- define "etcd-operator.container" -}}
image: {{ include "etcd-operator.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.containerSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The operators that are enabled, by the names of their binaries. */}}
{{- define "etcd-operator.enabled" -}}
{{- $all := dict "etcd-operator" .Values.clusterOperator "etcd-backup-operator" .Values.backupOperator "etcd-restore-operator" .Values.restoreOperator }}
{{- $enabled := dict }}
{{- range $operator, $settings := $all }}
{{- if $settings.enabled }}{{ $_ := set $enabled $operator $settings }}{{ end }}
{{- end }}
{{- toYaml $enabled }}
{{- end }}

{{/* Name of an operator's ServiceAccount. Call with (dict "root" $ "operator" <operator> "settings" <its settings>). */}}
{{- define "etcd-operator.serviceAccount" -}}
{{- if .settings.serviceAccount.create }}
{{- .settings.serviceAccount.name | default (include "etcd-operator.name" .) }}
{{- else }}
{{- required (printf "the operator %s needs serviceAccount.name when serviceAccount.create is false" .operator) .settings.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The CRDs of the objects that an operator manages, separated by commas. Call with the name of the binary. */}}
{{- define "etcd-operator.crds" -}}
{{- $plurals := list "etcdclusters" "etcdroles" "etcdusers" }}
{{- if eq . "etcd-backup-operator" }}{{ $plurals = list "etcdbackups" "etcdmirrors" }}{{ end }}
{{- if eq . "etcd-restore-operator" }}{{ $plurals = list "etcdrestores" }}{{ end }}
{{- join ".etcd.database.coreos.com, " $plurals }}.etcd.database.coreos.com
{{- end }}

{{/* The owner of a CRD that this release must not change: another release or an operator with --create-crd has written
     the CRD, and the CRD is at least as new as that of this chart. Empty: this release writes the CRD. Without access to
     the Kubernetes cluster (helm template), the result is empty. Call with (dict "root" $ "crd" <name>). */}}
{{- define "etcd-operator.crdOwner" -}}
{{- $metadata := get (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .crd) "metadata" | default dict }}
{{- $annotations := $metadata.annotations | default dict }}
{{- $operator := get $annotations "etcd.database.coreos.com/release" }}
{{- $release := get $annotations "meta.helm.sh/release-name" }}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" }}
{{- $owner := "" }}
{{- if and $release (or (ne $release .root.Release.Name) (ne $namespace .root.Release.Namespace)) }}
{{- $owner = printf "the release %s in the namespace %s" $release $namespace }}
{{- else if and $operator (not $release) }}
{{- $owner = "an operator with --create-crd" }}
{{- end }}
{{- /* A CRD without a valid version counts as older. */}}
{{- $version := get ($metadata.labels | default dict) "app.kubernetes.io/version" | default $operator | toString }}
{{- $version = regexMatch "^v?[0-9]+[.][0-9]+[.][0-9]+([+-].*)?$" $version | ternary $version "0.0.0" }}
{{- if and $owner (ge ((semver $version).Compare (semver .root.Chart.AppVersion)) 0) }}
{{- $owner }}
{{- end }}
{{- end }}

{{/* Whether the API server lacks ValidatingAdmissionPolicies. Without access to the Kubernetes cluster (helm template),
     Helm knows no kinds of the API server, and the result is empty. */}}
{{- define "etcd-operator.lacksPolicies" -}}
{{- $served := .Capabilities.APIVersions }}
{{- if and ($served.Has "v1/Pod") (not ($served.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")) }}true{{ end }}
{{- end }}

{{/* Name of the policy that rejects the deletion of protected EtcdClusters, and of its binding. The policy and the
     binding belong to no namespace, so their name contains the namespace of the release. */}}
{{- define "etcd-operator.protection" -}}
{{ include "etcd-operator.fullname" . }}-deletion-protection.{{ include "etcd-operator.namespace" . }}
{{- end }}

{{/* Name of the policy that rejects the deletion of namespaces with protected EtcdClusters, and of its binding. */}}
{{- define "etcd-operator.namespaceProtection" -}}
{{ include "etcd-operator.fullname" . }}-deletion-protection-namespaces.{{ include "etcd-operator.namespace" . }}
{{- end }}

{{/* Selector of the namespaces that the release manages. Empty: all namespaces. For a request on a Namespace, the API
     server compares the selector with the labels of this Namespace. */}}
{{- define "etcd-operator.namespaceSelector" -}}
{{- if not .Values.clusterWide -}}
namespaceSelector:
  matchExpressions:
  # The API server sets this label on every namespace.
  - key: kubernetes.io/metadata.name
    operator: In
    values:
    {{- toYaml (.Values.watchNamespaces | default (list (include "etcd-operator.namespace" .))) | nindent 4 }}
{{- end }}
{{- end }}

{{/* Variables of a policy: whether an EtcdCluster is protected, and whether it is the unfinished cluster of a restore.
     Call with the CEL variable that contains the EtcdCluster. */}}
{{- define "etcd-operator.protectionVariables" -}}
- name: isProtected
  expression: has({{ . }}.spec) && has({{ . }}.spec.protected) && {{ . }}.spec.protected
# Until a restore hands over a new cluster, the EtcdRestore owns it. A canceled restore must be able to delete this
# unfinished cluster.
- name: isUnfinished
  expression: >-
    has({{ . }}.metadata.ownerReferences) &&
    {{ . }}.metadata.ownerReferences.exists(owner, owner.kind == 'EtcdRestore')
{{- end }}

{{/* Rejects values that contradict each other, and values of the chart stable/etcd-operator. The error names the
     replacement. */}}
{{- define "etcd-operator.validate" -}}
{{- $old := list }}
{{- range $path, $new := .Files.Get "old-values.yaml" | fromYaml }}
{{- $operators := hasPrefix "OPERATOR." $path | ternary (list "clusterOperator" "backupOperator" "restoreOperator") (list "") }}
{{- range $operator := $operators }}
{{- $value := $.Values }}
{{- range splitList "." (replace "OPERATOR" $operator $path) }}
{{- $value = kindIs "map" $value | ternary $value (dict) }}
{{- $value = index $value . }}
{{- end }}
{{- if not (kindIs "invalid" $value) }}
{{- $old = append $old (printf "%s: %s" (replace "OPERATOR" $operator $path) (replace "OPERATOR" $operator $new)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.image.repository "quay.io/coreos/etcd-operator" }}
{{- $old = append $old "image.repository: quay.io/coreos/etcd-operator: remove it, the old image cannot run these operators" }}
{{- end }}
{{- if $old }}
{{- fail (printf "\nthis chart does not accept these values of the chart stable/etcd-operator. Use the replacement after the colon (docs/install.md, Migrate from coreos/etcd-operator):\n  %s" (join "\n  " $old)) }}
{{- end }}
{{- if and .Values.clusterWide .Values.watchNamespaces }}
{{- fail "watchNamespaces and clusterWide contradict each other: remove the list, or set clusterWide to false" }}
{{- end }}
{{- if and (eq .Values.scope "All") (not .Values.clusterWide) }}
{{- fail "scope: All has no effect without clusterWide: set clusterWide to true, or remove scope" }}
{{- end }}
{{- range $operator := list "backupOperator" "restoreOperator" }}
{{- if gt (int (get (get $.Values $operator) "shards")) 1 }}
{{- fail (printf "%s.shards: only the cluster operator can be divided into shards: set 1" $operator) }}
{{- end }}
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled }}
{{- fail "podMonitor.enabled and serviceMonitor.enabled scrape the same pods: set one of them" }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (not .Values.metricsService.enabled) }}
{{- fail "serviceMonitor.enabled needs metricsService.enabled, because a ServiceMonitor finds the operators by their Services: set metricsService.enabled to true" }}
{{- end }}
{{- end }}
